"""Files that grow from slice to slice: a slice goes on where the last one that counted stopped.

What a killed process wrote after that is cut off, so the lengths that are kept elsewhere must be kept after `sync`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol import MillstreamError


class Growing:
    """A file that is written at its end."""

    def __init__(self, path: Path, end: int = 0) -> None:
        """
        Args:
            end: bytes that count.
        """
        self._file = path.open("ab")
        self._file.truncate(end)
        self.end = end

    def write(self, data: bytes | memoryview) -> None:
        """Append."""
        self._file.write(data)
        self.end += len(data)

    def sync(self) -> None:
        """Return once everything is durable."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Say in a line what the disk did not take, and that nothing is lost by it."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise MillstreamError(
            f"cannot write {path}: {why}. What is done is kept: make room, and the batch goes on"
        ) from None
