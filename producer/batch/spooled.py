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


def spooled(
    folder: Folder, outcomes: Outcomes, rows: Rows, place: Place, answered: bool | None = None
) -> Iterator[tuple[Record, Place]]:
    """The records from a place on, each with the place after it.

    Args:
        answered: these alone, or those with an error alone. In the order of the input the others are not read.
    """
    bad_end = folder.checked().bad_end
    if folder.manifest().order == "completion":
        for record, after in _as_finished(folder, outcomes, rows, bad_end, place.spool):
            if answered is None or record.answered == answered:
                yield record, after
        return
    row, begin = place
    bad = iter(()) if answered else _bad(folder, begin, bad_end)
    asked = _asked(folder, outcomes, row, answered)
    for record, row_after, begin_after in heapq.merge(bad, asked, key=_position):
        row, begin = row_after or row, begin_after or begin
        yield record, Place(row, begin)


def _as_finished(
    folder: Folder, outcomes: Outcomes, rows: Rows, bad_end: int, begin: int
) -> Iterator[tuple[Record, Place]]:
    for record, end in _read_on(folder, begin, None):
        # else the row was asked once more, as the machine lost power before this one was counted
        if begin < bad_end or outcomes.begin(rows.number(record.line)) == begin:
            yield record, Place(0, end)
        begin = end


def _read_on(folder: Folder, begin: int, end: int | None) -> Iterator[tuple[Record, int]]:
    """The records of the spool in its order, each with where it ends."""
    with folder.places().spool.open("rb") as file:
        file.seek(begin)
        while (end is None or begin < end) and (raw := file.readline()):
            begin += len(raw)
            yield decoded(raw), begin


def _bad(folder: Folder, begin: int, end: int) -> Iterator[tuple[Record, int, int]]:
    """The records of rows that were not asked, with the spool's part of the place after each."""
    return ((record, 0, after) for record, after in _read_on(folder, begin, end))


def _asked(
    folder: Folder, outcomes: Outcomes, first: int, answered: bool | None
) -> Iterator[tuple[Record, int, int]]:
    """The records of rows that were asked, in their order, with the rows' part of the place after each."""
    with folder.places().spool.open("rb") as file:
        number = outcomes.next_done(first, answered)
        while number is not None:
            file.seek(outcomes.begin(number))
            yield decoded(file.readline()), number + 1, 0
            number = outcomes.next_done(number + 1, answered)


def _position(spooled: tuple[Record, int, int]) -> int:
    return spooled[0].line
