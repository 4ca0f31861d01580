"""A Parquet file that grows from slice to slice, though Arrow begins none but at the first byte of a file.

    file             PAR1 | row groups of piece 0 | of piece 1 | ... | footer
    file.0, .1 ...   the footer that each piece would have, until the end

Arrow takes a later piece for a file of its own that begins with all that is there. These bytes are swallowed, so its
row groups stand where its footer says; the footers become one at the end. The file is, byte for byte, that of one go.
"""

from __future__ import annotations

import io
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from producer.batch.growing import Growing
from producer.bulk.manifest import write_durably

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = 4
"""Bytes of `PAR1`, with which a file begins, a footer's own file too."""
_NOTHING = memoryview(bytes(1 << 20))


class Piece:
    """Row groups that follow those that a file has."""

    def __init__(self, path: Path, number: int, schema: pa.Schema, end: int) -> None:
        """
        Args:
            number: of the pieces that are there.
            end: bytes that they take.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._footer = footer(path, number)
        self._file = Growing(path, end)
        self._sink = _Sink(self._file)
        stream = pa.PythonFile(self._sink, "w")
        self._footers: list[Any] = []
        self._writer = pq.ParquetWriter(stream, schema, metadata_collector=self._footers)
        while (left := end - stream.tell()) > 0:
            stream.write(_NOTHING[:left])

    def write(self, table: pa.Table) -> None:
        """Append a row group.

        Raises:
            OSError: the disk did not take it.
        """
        self._writer.write_table(table)

    def end(self) -> int:
        """The bytes that count now. Durable on return; nothing more is written.

        Raises:
            OSError: the disk did not take it.
        """
        self._close_writer()
        self._file.sync()
        write_durably(self._footer, _bytes_of(self._footers[0]))
        return self._file.end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, fault: type[BaseException] | None, *_: object) -> None:
        # After a fault Arrow would tell one of its own.
        with nullcontext() if fault is None else suppress(Exception):
            self._close_writer()
        self._file.close()

    def _close_writer(self) -> None:
        self._sink.left = None  # its footer is not the file's
        self._writer.close()


class _Sink(io.RawIOBase):
    """Where Arrow writes a piece: the end of a file, once as much as the file has is swallowed."""

    def __init__(self, file: Growing) -> None:
        self._file = file
        self.left: int | None = file.end
        """Bytes that are still swallowed; None: all."""

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """Append what is not swallowed."""
        size = len(data)
        if self.left is not None:
            swallowed = min(self.left, size)
            self.left -= swallowed
            if swallowed < size:
                self._file.write(memoryview(data)[swallowed:])
        return size


def complete(path: Path, pieces: int, end: int) -> None:
    """Give a file of some pieces its footer; durable on return. Again: the same.

    Raises:
        OSError: the disk did not take it.
    """
    import pyarrow.parquet as pq

    whole, *rest = [pq.read_metadata(footer(path, number)) for number in range(pieces)]
    for more in rest:
        whole.append_row_groups(more)
    with closing(Growing(path, end)) as file:
        file.write(_bytes_of(whole)[MAGIC:])
        file.sync()


def footer(path: Path, number: int) -> Path:
    """Where a piece's footer is."""
    return path.with_name(f"{path.name}.{number}")


def _bytes_of(metadata: Any) -> bytes:
    import pyarrow as pa

    stream = pa.BufferOutputStream()
    metadata.write_metadata_file(stream)
    data: bytes = stream.getvalue().to_pybytes()
    return data
