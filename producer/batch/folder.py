"""A batch on disk. Everything that took time to get is here; the server holds where the batch stands.

<dir>/batch_<id>/
    order.json          what was asked
    input-0 ...         copies of the inputs
    rows, index         the rows to ask, unpacked, and where each begins (`rows.py`)
    names               who has which name, while rows are checked (`names.py`)
    outcomes            which rows are done (`outcomes.py`)
    checking.json, finalising.json         how far the first and the last slices are
    checked.json, ended.json               what they found
    output.jsonl, output.errors.jsonl      made at the end
    output.jsonl.run/   manifest.json, spool: as those of `millstream generate`
    lock                held by the process that works on it
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from broker.batches import Ending
from broker.embedded import state_home
from producer.bulk.ids import OnBadIds
from producer.bulk.inputs import Format, Input, Inputs
from producer.bulk.manifest import Manifest, sync_folder, write_durably
from producer.bulk.places import Places
from producer.bulk.requests import Requests
from protocol import MillstreamError

FINISHED_WITH = ("rows", "index", "outcomes", "names", "checking.json", "finalising.json")
"""Of no use once the output is there."""


class CopiedInput(BaseModel):
    """An input and its copy."""

    name: str
    """As the user wrote it."""
    format: Format
    file: str
    """In the batch's folder."""


class BatchOrder(BaseModel):
    """What `batch submit` asked, beside what the manifest holds."""

    v: Literal[1] = 1
    inputs: list[CopiedInput]
    defaults: dict[str, Any]
    """Sampling parameters for rows that set none."""
    bad_ids: OnBadIds
    window: int
    """Most rows on the queue at once."""
    plan: bool
    queue: str
    completion_window: str
    retention: str
    webhook: str | None = None


class Checked(BaseModel):
    """What validation found."""

    rows: int
    """Rows to ask."""
    bad: int
    """Rows that cannot be asked."""
    bad_end: int
    """Where their records, with which the spool begins, end."""
    endpoint: str
    torn: list[str]
    """What of the input was missing, in words."""

    @property
    def total(self) -> int:
        """Rows of the input."""
        return self.rows + self.bad


class Ended(BaseModel):
    """How a batch ended, once its files are in their places."""

    status: Ending
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class Folder:
    """The paths of a batch, and what is read and written whole."""

    path: Path

    @property
    def rows(self) -> Path:
        return self.path / "rows"

    @property
    def index(self) -> Path:
        return self.path / "index"

    @property
    def outcomes(self) -> Path:
        return self.path / "outcomes"

    @property
    def names(self) -> Path:
        return self.path / "names"

    @property
    def was_checked(self) -> bool:
        """Whether validation is over."""
        return (self.path / "checked.json").exists()

    def order(self) -> BatchOrder:
        """What was asked.

        Raises:
            MillstreamError: there is no such folder on this machine, or it is damaged.
        """
        place = self.path / "order.json"
        try:
            return BatchOrder.model_validate_json(place.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            if self.path.exists():
                raise MillstreamError(
                    f"{self.path} is not the folder of a batch: it has no order.json"
                ) from None
            raise _not_here(self.path) from None
        except ValidationError as error:
            raise MillstreamError(
                f"{place} is damaged, or another version's ({error.error_count()} faults)"
            ) from None

    def places(self) -> Places:
        """Where the run behind the batch reads and writes."""
        inputs = [Input(one.name, self.path / one.file, one.format) for one in self.order().inputs]
        ending = "parquet" if (self.path / "output.parquet.run").is_dir() else "jsonl"
        return Places(Inputs(inputs), self.path / f"output.{ending}")

    def manifest(self) -> Manifest:
        """The manifest of the run behind the batch."""
        manifest = Manifest.load(self.places().manifest)
        if manifest is None:
            raise _not_here(self.path)
        return manifest

    def checked(self) -> Checked:
        """What validation found, once it is over."""
        return Checked.model_validate_json((self.path / "checked.json").read_bytes())

    def requests(self, manifest: Manifest) -> Requests:
        """Makes the jobs of the rows."""
        defaults = self.order().defaults
        return Requests(manifest.run, defaults, manifest.model, manifest.rendering, manifest.wording)

    def found(self, checked: Checked) -> None:
        """Keep what validation found; durable on return."""
        write_durably(self.path / "checked.json", checked.model_dump_json().encode())

    def ended(self) -> Ended | None:
        """How the batch ended; None: it has not, or it has failed."""
        try:
            return Ended.model_validate_json((self.path / "ended.json").read_bytes())
        except FileNotFoundError:
            return None

    def end(self, ended: Ended) -> None:
        """Keep how the batch ended; durable on return."""
        write_durably(self.path / "ended.json", ended.model_dump_json().encode())

    def make(self, order: BatchOrder, manifest: Manifest) -> None:
        """Write what was asked into the folder, which is there; durable on return."""
        ending = "parquet" if manifest.format == "parquet" else "jsonl"
        run = self.path / f"output.{ending}.run"
        run.mkdir()
        manifest.save(run / "manifest.json")
        write_durably(self.path / "order.json", order.model_dump_json(indent=1).encode())
        sync_folder(self.path.parent)

    def drop_work(self) -> None:
        """Delete what the output was made of."""
        self.places().spool.unlink(missing_ok=True)
        for path in [*(self.path / name for name in FINISHED_WITH), *self.places().folder.glob("*.new*")]:
            path.unlink(missing_ok=True)

    def delete(self) -> None:
        """Delete everything."""
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the folder for this process, unless another one does: False. Its end lets go, whatever kind it is.

        Raises:
            MillstreamError: there is no such folder on this machine.
        """
        try:
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            raise _not_here(self.path) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mine = False
        else:
            mine = True
        try:
            yield mine
        finally:
            os.close(lock)


def default_dir(environ: Mapping[str, str]) -> Path:
    """Where batches are kept unless the command says otherwise."""
    if given := environ.get("MILLSTREAM_BATCH_DIR"):
        return Path(given)
    return state_home(environ) / "batches"


def folders_of(dir: Path, queue: str) -> list[Path]:
    """The folders in `dir` of the batches of a queue; those that cannot be read are left out."""
    found = []
    for path in sorted(dir.glob("batch_*")):
        try:
            order = Folder(path).order()
        except (MillstreamError, OSError):
            continue
        if order.queue == queue:
            found.append(path)
    return found


def _not_here(path: Path) -> MillstreamError:
    return MillstreamError(
        f"{path} is not on this machine: whoever works on a batch must see the folder it is in"
    )
