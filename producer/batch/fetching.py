"""The files of a batch that has ended, copied to where they are wanted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.batches import Batch
from producer.bulk.inputs import Inputs
from producer.bulk.manifest import FileState, sync_folder
from producer.bulk.places import Places, check
from producer.refusal import Refused


def fetch(batch: Batch, output: Path, *, overwrite: bool) -> Places:
    """Copy output and errors; each takes its place in one step, the errors first. Again: nothing changes.

    Raises:
        Refused: something else is there, the ending is another one, nothing can be written there, or the batch's
            folder is not on this machine.
        OSError: they cannot be written.
    """
    places = check(Inputs([]), output)
    pairs = [(Path(batch.error_file), places.errors), (Path(batch.output), places.output)]
    if (places.output.suffix == ".parquet") != (Path(batch.output).suffix == ".parquet"):
        raise Refused(
            f"the batch is {Path(batch.output).suffix[1:]}: name an output of that ending, not {output}"
        )
    for source, place in pairs:
        if not source.is_file():
            raise Refused(f"{source} is not on this machine: fetch the batch where it was worked on")
        if not overwrite and place.exists() and FileState.of(place) != FileState.of(source):
            raise Refused(f"{place} exists and is something else: choose another output, or --overwrite")
    for source, place in pairs:
        with _fresh(place) as fresh:
            shutil.copyfile(source, fresh)
    sync_folder(places.output.parent)
    return places


@contextmanager
def _fresh(place: Path) -> Iterator[Path]:
    """A path beside a place that takes it once what is written there is durable."""
    fresh = place.with_name(f".{place.name}.{os.getpid()}.new")
    try:
        yield fresh
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.replace(place)
    finally:
        fresh.unlink(missing_ok=True)
