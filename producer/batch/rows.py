"""The rows of a batch that can be asked, as one file in which any of them is found at once.

    rows     12 json {"prompt": ...}\\n        position, kind, the row as a line of JSON, whatever the input was
    index    (position, offset in `rows`)     16 bytes a row, positions ascending

So a slice begins at any row without reading those before it, and finds the row of a job by its position.
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_left
from pathlib import Path

from producer.batch.growing import Growing
from producer.bulk.lines import Line, file_and_line

_ENTRY = struct.Struct("=QQ")


class RowsWriter:
    """Writes both files."""

    def __init__(self, rows: Path, index: Path, count: int = 0, end: int = 0) -> None:
        """
        Args:
            count: rows that are there.
            end: bytes that they take.
        """
        self._rows = Growing(rows, end)
        self._index = Growing(index, count * _ENTRY.size)
        self.count = count

    @property
    def end(self) -> int:
        """Bytes of `rows`."""
        return self._rows.end

    def add(self, line: Line) -> None:
        """Append a row; its position is greater than those before."""
        self._index.write(_ENTRY.pack(line.number, self._rows.end))
        self._rows.write(f"{line.number} {line.kind} ".encode() + line.raw + b"\n")
        self.count += 1

    def sync(self) -> None:
        """Return once every row is durable."""
        self._rows.sync()
        self._index.sync()

    def close(self) -> None:
        """Close the files."""
        self._rows.close()
        self._index.close()


class Rows:
    """The rows, by their number from 0."""

    def __init__(self, rows: Path, index: Path, names: list[str]) -> None:
        """
        Args:
            names: of the inputs, as the user wrote them.
        """
        self._file = rows.open("rb")
        self._names = names if len(names) > 1 else []
        with index.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._index = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b""
        self._entries = memoryview(self._index).cast("Q")

    def __len__(self) -> int:
        return len(self._entries) // 2

    def __getitem__(self, number: int) -> Line:
        """A row; those that follow each other are read fastest."""
        position, offset = self.position(number), self._entries[2 * number + 1]
        if self._file.tell() != offset:
            self._file.seek(offset)
        _, kind, raw = self._file.readline().split(b" ", 2)
        name = self._names[file_and_line(position)[0]] if self._names else None
        return Line(position, raw[:-1], kind=kind.decode(), file=name)  # type: ignore[arg-type]

    def position(self, number: int) -> int:
        """Where a row stands in the inputs."""
        return self._entries[2 * number]

    def number(self, position: int) -> int:
        """The number of the row at a position, which is one of them."""
        return bisect_left(range(len(self)), position, key=self.position)

    def close(self) -> None:
        """Close the files."""
        self._entries.release()
        if isinstance(self._index, mmap.mmap):
            self._index.close()
        self._file.close()
