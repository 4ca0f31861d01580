"""The records of a batch whose rows are all done, in the order of its files, from any of them on.

spool     bad bad bad | answers and errors as they came       `outcomes` knows where the record of each row begins
input     the bad ones and the rows that were asked, merged by their positions
completion    the spool as it is
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from producer.batch.folder import Folder
from producer.batch.outcomes import Outcomes
from producer.batch.rows import Rows
from producer.bulk.records import Record
from producer.bulk.spool import decoded


class Place(NamedTuple):
    """Where to go on."""

    row: int
    """The first row that was asked and has not come."""
    spool: int
    """The byte of the spool from which it is read in its own order."""


START = Place(0, 0)


def spooled(folder: Folder, outcomes: Outcomes, rows: Rows, place: Place) -> Iterator[tuple[Record, Place]]:
    """The records from a place on, each with the place after it."""
    bad_end = folder.checked().bad_end
    if folder.manifest().order == "completion":
        yield from _as_finished(folder, outcomes, rows, bad_end, place.spool)
        return
    row, begin = place
    bad = _read_on(folder, begin, bad_end)
    asked = _asked(folder, outcomes, rows, row)
    for record, length in heapq.merge(bad, asked, key=_position):
        row, begin = (row, begin + length) if length else (row + 1, begin)
        yield record, Place(row, begin)


def _as_finished(
    folder: Folder, outcomes: Outcomes, rows: Rows, bad_end: int, begin: int
) -> Iterator[tuple[Record, Place]]:
    for record, length in _read_on(folder, begin, None):
        counts = begin < bad_end or outcomes.begin(rows.number(record.line)) == begin
        begin += length
        if counts:  # else the row was asked once more, as the machine lost power before this one was counted
            yield record, Place(0, begin)


def _read_on(folder: Folder, begin: int, end: int | None) -> Iterator[tuple[Record, int]]:
    """The records of the spool in its order, with their lengths."""
    with folder.places().spool.open("rb") as file:
        file.seek(begin)
        while (end is None or begin < end) and (raw := file.readline()):
            begin += len(raw)
            yield decoded(raw), len(raw)


def _asked(folder: Folder, outcomes: Outcomes, rows: Rows, first: int) -> Iterator[tuple[Record, int]]:
    """The records of rows that were asked, in their order; 0 with each."""
    with folder.places().spool.open("rb") as file:
        for number in range(first, len(rows)):
            file.seek(outcomes.begin(number))
            yield decoded(file.readline()), 0


def _position(spooled: tuple[Record, int]) -> int:
    return spooled[0].line
