"""Finished rows on disk, in the order they finished, before the output file is made of them.

    12 9f2c...a1 + {"prompt": ..., "completion": ...}\\n       position, digest of the input line, + or -, the record
    15 03be...77 - {"line": 15, "error": ...}\\n

A record counts once `append` has returned: it is synced. After a crash the tail may be torn (half a record, or a
block of zeros); opening cuts it off. In memory there are eight bytes a row, an array
a file: where the last record of a line begins.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from producer.bulk.lines import file_and_line
from producer.bulk.records import Record
from protocol import MillstreamError

_HEADER = re.compile(rb"([1-9]\d{0,17}) ([0-9a-f]{16}) ([+-]) ")
_HEADER_BYTES = 64
_NONE = -1


def encoded(record: Record) -> bytes:
    """A record as it stands in a spool."""
    sign = "+" if record.answered else "-"
    return f"{record.line} {record.digest} {sign} ".encode() + record.payload + b"\n"


def decoded(raw: bytes) -> Record:
    """A record of a spool, with its line end."""
    line, digest, sign, payload = raw.split(b" ", 3)
    return Record(int(line), digest.decode(), sign == b"+", payload[:-1])


def whole_records(path: Path, start: int = 0) -> Iterator[tuple[int, bool, int]]:
    """The records of a spool from a byte on, up to a torn one: position, whether answered, bytes."""
    with path.open("rb") as file:
        file.seek(start)
        for raw in file:
            header = _HEADER.match(raw)
            if header is None or not raw.endswith(b"\n") or b"\0" in raw:
                break
            yield int(header[1]), header[3] == b"+", len(raw)


class Spool:
    """The spool of one run; it owns file and index."""

    def __init__(self, path: Path) -> None:
        """Open the spool, or begin one; a torn tail is cut off."""
        self._path = path
        self._offsets: list[array[int]] = []
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._end = self._scan()
        os.ftruncate(self._file, self._end)

    def append(self, records: Sequence[Record]) -> None:
        """Write records and return once they are durable.

        Raises:
            MillstreamError: the disk did not take them; the spool is as it was.
        """
        if not records:
            return
        starts, block = [], bytearray()
        for record in records:
            starts.append(self._end + len(block))
            block += encoded(record)
        self._write(block)
        for record, start in zip(records, starts, strict=True):
            self._point(record.line, start)
        self._end += len(block)

    def __contains__(self, line: int) -> bool:
        """Whether a line is done, or was with other content."""
        return self._offset(line) != _NONE

    def holds(self, line: int, digest: str) -> bool | None:
        """Whether a line with that content is done: True answered, False failed, None not done."""
        offset = self._offset(line)
        if offset == _NONE:
            return None
        header = os.pread(self._file, _HEADER_BYTES, offset).split(b" ", 3)
        return header[2] == b"+" if header[1] == digest.encode() else None

    def record(self, line: int) -> Record:
        """The last record of a line that has one."""
        with self._path.open("rb") as file:
            file.seek(self._offset(line))
            return decoded(file.readline())

    def drop(self, first: int, last: int | None = None) -> None:
        """Forget the lines from `first` up to `last` (excluded; None: to the end): the input has them no more."""
        first_file, first_line = file_and_line(first)
        last_file, last_line = file_and_line(last) if last is not None else (len(self._offsets), 0)
        for file in range(first_file, min(last_file + 1, len(self._offsets))):
            offsets = self._offsets[file]
            begin = first_line if file == first_file else 0
            end = min(last_line, len(offsets)) if file == last_file else len(offsets)
            for line in range(begin, end):
                offsets[line] = _NONE

    def records(self) -> Iterator[Record]:
        """The last record of each line, in the order of lines."""
        with self._path.open("rb") as file:
            for offsets in self._offsets:
                for offset in offsets:
                    if offset != _NONE:
                        file.seek(offset)
                        yield decoded(file.readline())

    def as_finished(self) -> Iterator[Record]:
        """The last record of each line, in the order in which they were stored."""
        start = 0
        with self._path.open("rb") as file:
            for raw in file:
                record = decoded(raw)
                if self._offset(record.line) == start:
                    yield record
                start += len(raw)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scan(self) -> int:
        """Index the records; where the last whole one ends."""
        end = 0
        for line, _, size in whole_records(self._path):
            self._point(line, end)
            end += size
        return end

    def _write(self, block: bytearray) -> None:
        try:
            view = memoryview(block)
            at = self._end
            while view:
                written = os.pwrite(self._file, view, at)
                view, at = view[written:], at + written
            os.fdatasync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise MillstreamError(
                f"cannot write {self._path}: {error.strerror}. What is done is kept: make room, "
                "and run the same command again"
            ) from None

    def _offset(self, at: int) -> int:
        file, line = file_and_line(at)
        there = file < len(self._offsets) and line < len(self._offsets[file])
        return self._offsets[file][line] if there else _NONE

    def _point(self, at: int, offset: int) -> None:
        file, line = file_and_line(at)
        while len(self._offsets) <= file:
            self._offsets.append(array("q"))
        offsets = self._offsets[file]
        missing = line + 1 - len(offsets)
        if missing > 0:
            offsets.extend(array("q", [_NONE]) * missing)
        offsets[line] = offset
