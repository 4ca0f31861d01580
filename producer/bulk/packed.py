"""The bytes of a file that may be compressed: every member of gzip, every frame of zstd.

Told by the first bytes, not by the name. A file that ends early or is damaged gives what could be read; `torn` then
says what is wrong.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from producer.refusal import Refused

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SKIPPABLE = range(0x184D2A50, 0x184D2A60)
"""A zstd file may begin with a frame that holds no data (RFC 8878, 3.1.2), as pzstd writes."""
_PIECE = 1 << 14
"""Bytes that are unpacked at once: zstd gives up to some thousand times as many."""


class _Torn(Exception):
    """The compressed data ends early, or is damaged."""


class Unpacked(io.RawIOBase):
    """The unpacked bytes of a compressed file. What follows a fault is left out, and `torn` tells the fault."""

    def __init__(self, file: BinaryIO, pieces: Callable[[BinaryIO], Iterator[bytes]]) -> None:
        self.torn: str | None = None
        self._file = file
        self._pieces = pieces(file)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as one piece does; 0 at the end."""
        while not self._left:
            try:
                self._left = memoryview(next(self._pieces))
            except StopIteration:
                return 0
            except _Torn as fault:
                self.torn = str(fault)
                return 0
        taken = self._left[: len(buffer)]
        buffer[: len(taken)] = taken
        self._left = self._left[len(taken) :]
        return len(taken)

    def close(self) -> None:
        """Close the file too."""
        self._file.close()
        super().close()


def open_unpacked(path: Path) -> tuple[BinaryIO, Callable[[], str | None]]:
    """A file's bytes, unpacked, and what tells after the last of them whether some are missing.

    Raises:
        OSError: it cannot be read.
        Refused: it is zstd, and `zstandard` is not installed.
    """
    file = path.open("rb")
    pieces = _pieces_of(file.peek(4)[:4], path)
    if pieces is None:
        return file, lambda: None
    unpacked = Unpacked(file, pieces)
    return io.BufferedReader(unpacked, 1 << 16), lambda: unpacked.torn


def _pieces_of(start: bytes, path: Path) -> Callable[[BinaryIO], Iterator[bytes]] | None:
    if start.startswith(GZIP):
        return _gzip_pieces
    if start == ZSTD or int.from_bytes(start, "little") in _SKIPPABLE:
        try:
            import zstandard  # noqa: F401
        except ModuleNotFoundError:
            raise Refused(f"{path} is zstd: pip install 'millstream[files]', or unpack it first") from None
        return _zstd_pieces
    return None


def _gzip_pieces(file: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as members:
        try:
            while piece := members.read1(_PIECE):
                yield piece
        except EOFError:
            raise _Torn("the gzip data ends early") from None
        except (gzip.BadGzipFile, zlib.error) as fault:
            raise _Torn(f"the gzip data is damaged ({fault})") from None


def _zstd_pieces(file: BinaryIO) -> Iterator[bytes]:
    """Frame by frame: zstandard's stream reader takes a frame that ends early for the end (0.25)."""
    import zstandard

    frames = zstandard.ZstdDecompressor()
    frame, begun = frames.decompressobj(), False
    packed = b""
    try:
        while packed := packed or file.read(_PIECE):
            begun = True
            if piece := frame.decompress(packed):
                yield piece
            packed = b""
            if frame.eof:
                packed, begun = frame.unused_data, False
                frame = frames.decompressobj()
    except zstandard.ZstdError as fault:
        raise _Torn(f"the zstd data is damaged ({fault})") from None
    if begun:
        raise _Torn("the zstd data ends early")
