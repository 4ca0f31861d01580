"""Where a run reads and writes, and what is refused before it begins.

answers.jsonl             made at the end, in one step
answers.errors.jsonl      rows without an answer
answers.jsonl.run/        manifest.json   what the run is; stays, so that the same command knows its output
                          rows            line, outcome and digest of every row of the output; stays
                          spool           finished rows, while the run goes on; stays where the output is not JSON
                                          lines of ours, from which they could be read again when the input grows
                          lock            one run at a time
                          worker.log      of a worker that was started for the run
                          input-N         standard input or what a URL names, while the run goes on
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from producer.bulk.inputs import Inputs
from producer.refusal import Refused


@dataclass(frozen=True, slots=True)
class Places:
    """The paths of a run, links resolved: the file behind a link is replaced, not the link."""

    inputs: Inputs
    output: Path

    @property
    def errors(self) -> Path:
        """The error file."""
        return self.output.with_name(f"{self.output.stem}.errors{self.output.suffix or '.jsonl'}")

    @property
    def folder(self) -> Path:
        """What is kept beside the output."""
        return self.output.with_name(f"{self.output.name}.run")

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def rows(self) -> Path:
        return self.folder / "rows"

    @property
    def spool(self) -> Path:
        return self.folder / "spool"

    @property
    def worker_log(self) -> Path:
        return self.folder / "worker.log"


def check(inputs: Inputs, output: Path) -> Places:
    """The places of a run, if the output is fit for it. Changes nothing.

    Raises:
        Refused: they are not.
    """
    try:
        return _checked(Places(inputs, output.resolve()))
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a name too long, no name at all
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Refused(f"cannot write {output}: {why}") from None


def _checked(places: Places) -> Places:
    output = places.output
    if not places.output.parent.is_dir():
        raise Refused(f"cannot write {output}: there is no folder {output.parent}")
    for path in (places.output, places.errors):
        if not path.exists():
            continue
        if not path.is_file():
            raise Refused(f"cannot write {path}: it is no regular file")
        if any(path.samefile(source) for source in places.inputs.paths):
            raise Refused(f"{path} is the input itself: choose another output")
    return places


@contextmanager
def locked(places: Places) -> Iterator[None]:
    """Hold the output for this process; makes the folder beside it.

    Raises:
        Refused: another run has it, or nothing can be written there.
    """
    try:
        places.folder.mkdir(exist_ok=True)
        lock = os.open(places.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise Refused(f"cannot write beside {places.output}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 20).decode(errors="replace").strip()
        os.close(lock)
        raise Refused(f"another run is writing {places.output} (process {owner or 'unknown'})") from None
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)
