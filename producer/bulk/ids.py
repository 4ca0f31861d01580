"""Names that the user gave the rows: in a batch file each row has one of its own, or nothing runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from producer.bulk.inputs import Inputs
from producer.bulk.lines import BadRow, Line, Row, file_and_line, parse, where
from producer.refusal import Refused

SHOWN = 10


@dataclass(frozen=True, slots=True)
class BadId:
    """A row whose name is none, or another row's too."""

    row: Row
    message: str


def bad_ids(inputs: Inputs, column: str | None) -> Iterator[BadId]:
    """The rows without a name of their own; of two with the same name, the second. Lines that are no rows are passed
    over.

    Eight bytes of hash stand for a name, so a million names take some 100 MB: two of a million meet by chance once in
    37 million runs.

    Args:
        column: holds the names; None: `custom_id`, where the first row is one of a batch file, else nothing is
            looked at.
    """
    rows = (row for line in inputs.rows() if isinstance(line, Line) and isinstance(row := parse(line), Row))
    first = next(rows, None)
    if first is None or (column is None and not _is_batch(first)):
        return
    name_column = column or "custom_id"
    seen: dict[int, int] = {}
    for row in chain([first], rows):
        name = row.columns.get(name_column)
        if not isinstance(name, str) or not name:
            yield BadId(row, f"{name_column} is {_kind(name, name_column in row.columns)}")
            continue
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
        before = seen.setdefault(key, row.line)
        if before != row.line:
            yield BadId(row, f"{name_column} is that of line {file_and_line(before)[1]} too")


def refuse_bad_ids(inputs: Inputs, column: str | None) -> None:
    """Nothing runs where two answers could not be told apart.

    Raises:
        Refused: some rows have no name of their own; it lists them.
    """
    found: list[str] = []
    more_rows = 0
    for bad in bad_ids(inputs, column):
        if len(found) < SHOWN:
            found.append(f"{where(bad.row.file, file_and_line(bad.row.line)[1])}: {bad.message}")
        else:
            more_rows += 1
    if found:
        more = f"; and {more_rows:,} more" if more_rows else ""
        raise Refused(f"{'; '.join(found)}{more}. --bad-ids rows makes these rows errors and runs the others")


def as_errors(inputs: Inputs, column: str | None) -> dict[int, BadRow]:
    """The same rows as entries of the error file, by position."""
    return {bad.row.line: bad.row.bad("invalid_id", bad.message) for bad in bad_ids(inputs, column)}


def _is_batch(row: Row) -> bool:
    return "body" in row.columns and "prompt" not in row.columns and "messages" not in row.columns


def _kind(name: Any, there: bool) -> str:
    if not there:
        return "missing"
    return "empty" if name == "" else "null" if name is None else "no text"
