"""Which rows of a batch are done. The spool holds their records; this file says it in a byte a row.

    outcomes   (end of the spool as far as it is counted here)  8 bytes
               0 to do | 1 answered | 2 failed                  a byte a row
               where the row's record begins in the spool       8 bytes a row

A slice opens it without reading the spool: only what the slice before had no time to count, which is a batch of
records or half of one. The spool is written and synced first, so a record that counts is durable.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from producer.batch.folder import Folder
from producer.batch.growing import disk_faults
from producer.batch.rows import Rows
from producer.bulk.records import Record
from producer.bulk.spool import encoded, whole_records

_PLACE = struct.Struct("=Q")
TO_DO, ANSWERED, FAILED = 0, 1, 2


class Outcomes:
    """The outcomes of one batch; it owns spool and file while it is open. At most one process has it."""

    def __init__(self, path: Path, spool: Path, rows: Rows, bad: int) -> None:
        """
        Args:
            bad: rows that failed before any was asked; the spool begins with them.
        """
        self._rows = rows
        self._bad = bad
        self._spool_path = spool
        self._file = os.open(path, os.O_RDWR)
        self._spool = os.open(spool, os.O_RDWR)
        (self._end,) = _PLACE.unpack(os.pread(self._file, _PLACE.size, 0))
        self._done = bytearray(os.pread(self._file, len(rows), _PLACE.size).ljust(len(rows), b"\0"))
        self._catch_up()

    @staticmethod
    def create(path: Path, end: int) -> None:
        """Begin the file; durable on return.

        Args:
            end: of the spool: so far it holds rows that will not be asked.
        """
        with path.open("wb") as file:
            file.write(_PLACE.pack(end))
            file.flush()
            os.fsync(file.fileno())

    @property
    def answered(self) -> int:
        """Rows that have an answer."""
        return self._done.count(ANSWERED)

    @property
    def failed(self) -> int:
        """Rows that have an error."""
        return self._done.count(FAILED) + self._bad

    def next_to_do(self, start: int) -> int | None:
        """The first row to do from a number on; None: there is none."""
        return self._next(TO_DO, start)

    def next_done(self, start: int, answered: bool | None) -> int | None:
        """The first row from a number on that has an answer, or (False) an error; None: any, once all are done."""
        if answered is None:
            return start if start < len(self._done) else None
        return self._next(ANSWERED if answered else FAILED, start)

    def is_done(self, number: int) -> bool:
        """Whether a row is done."""
        return self._done[number] != TO_DO

    def begin(self, number: int) -> int:
        """Where the record of a row that is done begins in the spool."""
        begin: int = _PLACE.unpack(os.pread(self._file, _PLACE.size, self._place_of(number)))[0]
        return begin

    def append(self, records: Sequence[Record]) -> None:
        """Keep the records of rows that have none; durable on return.

        Raises:
            MillstreamError: the disk did not take them; nothing is lost.
        """
        fresh = {self._rows.number(record.line): record for record in records}
        fresh = {number: record for number, record in fresh.items() if not self.is_done(number)}
        if not fresh:
            return
        blocks = list(map(encoded, fresh.values()))
        with disk_faults(self._spool_path):
            _write(self._spool, b"".join(blocks), self._end)
            for (number, record), block in zip(fresh.items(), blocks, strict=True):
                self._take(number, record.answered, len(block))
            self._count()

    def close(self) -> None:
        """Close the files."""
        os.close(self._file)
        os.close(self._spool)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, outcome: int, start: int) -> int | None:
        found = self._done.find(outcome, start)
        return None if found < 0 else found

    def _catch_up(self) -> None:
        """Count the records that the process before wrote at its end, and cut off half a one."""
        for position, answered, length in whole_records(self._spool_path, self._end):
            self._take(self._rows.number(position), answered, length)
        os.ftruncate(self._spool, self._end)
        self._count()

    def _take(self, number: int, answered: bool, length: int) -> None:
        """Take in the record that follows in the spool."""
        os.pwrite(self._file, _PLACE.pack(self._end), self._place_of(number))
        self._done[number] = ANSWERED if answered else FAILED
        os.pwrite(self._file, self._done[number : number + 1], _PLACE.size + number)
        self._end += length

    def _count(self) -> None:
        """What was taken in counts; durable on return."""
        _write(self._file, _PLACE.pack(self._end), 0)

    def _place_of(self, number: int) -> int:
        return _PLACE.size + len(self._done) + _PLACE.size * number


@contextmanager
def opened(folder: Folder) -> Iterator[tuple[Outcomes, Rows]]:
    """The outcomes and the rows of a batch that was checked; its folder is locked."""
    names = [one.name for one in folder.order().inputs]
    rows = Rows(folder.rows, folder.index, names)
    try:
        with Outcomes(folder.outcomes, folder.places().spool, rows, folder.checked().bad) as outcomes:
            yield outcomes, rows
    finally:
        rows.close()


def _write(file: int, block: bytes, at: int) -> None:
    """Write all of it, durable on return."""
    view = memoryview(block)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written
    os.fdatasync(file)
