"""The last slices of a batch: output and errors are made of the spool, as `millstream generate` makes them.

A slice goes on where the last one stopped: `finalising.json` says how far lines are; tables: `tables.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from pydantic import BaseModel

from producer.batch.folder import Folder
from producer.batch.growing import Growing, disk_faults
from producer.batch.outcomes import Outcomes
from producer.batch.rows import Rows
from producer.batch.spooled import START, Place, spooled
from producer.batch.tables import RecordsFrom, TableFile
from producer.bulk.manifest import Manifest, sync_folder, write_durably
from producer.bulk.openai_output import OpenAILines
from producer.bulk.parquet_output import ANSWERS, ERRORS
from producer.bulk.places import Places
from producer.bulk.records import Record

PIECE_S = 2.0
"""What is written is made durable this often."""


class Written(BaseModel):
    """How far the files are."""

    place: Place = START
    output: int = 0
    errors: int = 0
    """How long they are."""
    whole: bool = False


def finalise(folder: Folder, outcomes: Outcomes, rows: Rows, go_on: Callable[[], bool]) -> bool:
    """Write the files until they are in their places, or `go_on` says no (False). Again: it goes on.

    Raises:
        MillstreamError: the disk did not take them; nothing is lost.
    """
    places, manifest = folder.places(), folder.manifest()

    def records(place: Place, answered: bool | None) -> Iterator[tuple[Record, Place]]:
        return spooled(folder, outcomes, rows, place, answered)

    with disk_faults(places.output):
        if manifest.format == "parquet":
            files = [(ERRORS, _fresh(places, places.errors)), (ANSWERS, _fresh(places, places.output))]
            whole = all(TableFile(kind, path, places.inputs, records, go_on).write() for kind, path in files)
        else:
            whole = _write_lines(folder, places, records, go_on)
        if whole:
            _take_places(places)
    return whole


def _write_lines(folder: Folder, places: Places, records: RecordsFrom, go_on: Callable[[], bool]) -> bool:
    """Write both files beside their places; whether they are whole. Durable on return."""
    state = folder.path / "finalising.json"
    at = Written.model_validate_json(state.read_bytes()) if state.exists() else Written()
    if at.whole:
        return True
    line_of = _lines(folder.manifest())
    with ExitStack() as stack:
        output = stack.enter_context(closing(Growing(_fresh(places, places.output), at.output)))
        errors = stack.enter_context(closing(Growing(_fresh(places, places.errors), at.errors)))

        def save(place: Place, *, whole: bool) -> None:
            output.sync()
            errors.sync()
            written = Written(place=place, output=output.end, errors=errors.end, whole=whole)
            write_durably(state, written.model_dump_json().encode())

        place = at.place
        due = time.monotonic() + PIECE_S
        for record, place in records(at.place, None):
            (output if record.answered else errors).write(line_of(record) + b"\n")
            if time.monotonic() >= due:
                save(place, whole=False)
                if not go_on():
                    return False
                due = time.monotonic() + PIECE_S
        save(place, whole=True)
    return True


def _take_places(places: Places) -> None:
    for place in (places.errors, places.output):
        if _fresh(places, place).exists():
            _fresh(places, place).replace(place)
    sync_folder(places.output.parent)


def _fresh(places: Places, place: Path) -> Path:
    return places.folder / f"{place.name}.new"


def _lines(manifest: Manifest) -> Callable[[Record], bytes]:
    return OpenAILines(manifest).line if manifest.format == "openai" else _payload


def _payload(record: Record) -> bytes:
    return record.payload
