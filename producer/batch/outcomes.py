"""Which rows of a batch are done. The spool holds their records; this file says it in a byte a row.

    outcomes   (end of the spool as far as it is counted here)  8 bytes
               0 to do | 1 answered | 2 failed                  a byte a row

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
from producer.batch.rows import Rows
from producer.bulk.records import Record
from producer.bulk.spool import encoded, whole_records
from protocol import MillstreamError

_END = struct.Struct("=Q")
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
        (self._end,) = _END.unpack(os.pread(self._file, _END.size, 0))
        self._done = bytearray(os.pread(self._file, len(rows), _END.size).ljust(len(rows), b"\0"))
        self._catch_up()

    @staticmethod
    def create(path: Path, spool: Path) -> None:
        """Begin the file: what is in the spool are rows that will not be asked."""
        with path.open("wb") as file:
            file.write(_END.pack(spool.stat().st_size))
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
        found = self._done.find(TO_DO, start)
        return None if found < 0 else found

    def is_done(self, number: int) -> bool:
        """Whether a row is done."""
        return self._done[number] != TO_DO

    def append(self, records: Sequence[Record]) -> None:
        """Keep the records of rows that have none; durable on return.

        Raises:
            MillstreamError: the disk did not take them; nothing is lost.
        """
        fresh = {self._rows.number(record.line): record for record in records}
        fresh = {number: record for number, record in fresh.items() if not self.is_done(number)}
        if not fresh:
            return
        block = b"".join(map(encoded, fresh.values()))
        try:
            _write(self._spool, block, self._end)
            self._count({number: record.answered for number, record in fresh.items()}, len(block))
        except OSError as error:
            raise MillstreamError(
                f"cannot write {self._spool_path}: {error.strerror}. What is done is kept: make room, and the batch "
                "goes on"
            ) from None

    def close(self) -> None:
        """Close the files."""
        os.close(self._file)
        os.close(self._spool)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _catch_up(self) -> None:
        """Count the records that the process before wrote at its end, and cut off half a one."""
        uncounted: dict[int, bool] = {}
        size = 0
        for position, answered, length in whole_records(self._spool_path, self._end):
            uncounted[self._rows.number(position)] = answered
            size += length
        os.ftruncate(self._spool, self._end + size)
        self._count(uncounted, size)

    def _count(self, answered: dict[int, bool], size: int) -> None:
        for number, is_answered in answered.items():
            self._done[number] = ANSWERED if is_answered else FAILED
            os.pwrite(self._file, self._done[number : number + 1], _END.size + number)
        self._end += size
        _write(self._file, _END.pack(self._end), 0)


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
