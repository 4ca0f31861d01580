"""Names that the user gave the rows: in a batch file each row has one of its own, or nothing runs."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, pairwise
from tempfile import TemporaryFile
from typing import IO, Any, Literal

from pydantic import BaseModel

from producer.bulk.inputs import Inputs
from producer.bulk.lines import BadRow, Line, Row, RowFault, file_and_line, parse, where
from producer.refusal import Refused

OnBadIds = Literal["refuse", "rows"]
"""What becomes of a run where names are missing or not unique: nothing runs, or these rows are errors."""
SHOWN = 10
RUN = 1 << 20
"""Keys sorted at once."""
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class BadId:
    """A row whose name is none, or another row's too."""

    row: Row
    column: str
    """Holds the names."""
    first: int = 0
    """The position of the first row with the same name; 0: it has no name."""

    @property
    def message(self) -> str:
        """What is wrong with it."""
        return unnamed(self.row, self.column) or taken(self.column, self.first)


def bad_ids(inputs: Inputs, column: str | None) -> Iterator[BadId]:
    """The rows without a name of their own; of those with the same name, all but the first.

    Lines that are no rows are passed over. The inputs are read once; twice, where there are such rows.

    Args:
        column: holds the names; None: `custom_id`, where the first row is one of a batch file, else nothing is
            looked at.
    """
    first = next(_rows(inputs), None)
    name_column = None if first is None else name_column_of(first, column)
    if name_column is None:
        return
    nameless = 0

    def keys() -> Iterator[int]:
        nonlocal nameless
        for row in _rows(inputs):
            if unnamed(row, name_column):
                nameless += 1
            else:
                yield _key(row.columns[name_column])

    repeated = _repeated(keys())
    if not repeated and not nameless:
        return
    seen: dict[str, int] = {}
    for row in _rows(inputs):
        if unnamed(row, name_column):
            yield BadId(row, name_column)
            continue
        name = row.columns[name_column]
        if _key(name) in repeated and (before := seen.setdefault(name, row.line)) != row.line:
            yield BadId(row, name_column, before)


def name_column_of(first: Row, column: str | None) -> str | None:
    """Which column holds the names of the rows that begin with this one; None: they need none."""
    return column or ("custom_id" if _is_batch(first) else None)


def unnamed(row: Row, column: str) -> str | None:
    """What is wrong with a row's name; None: nothing."""
    name = row.columns.get(column)
    if isinstance(name, str) and name:
        return None
    return f"{column} is {_kind(name, column in row.columns)}"


def taken(column: str, before: int) -> str:
    """What is wrong with a name that the row at another position has too."""
    return f"{column} is that of line {file_and_line(before)[1]} too"


def _rows(inputs: Inputs) -> Iterator[Row]:
    return (row for line in inputs.rows() if isinstance(line, Line) and isinstance(row := parse(line), Row))


def _key(name: str) -> int:
    """Eight bytes of hash that stand for a name; whoever has the same may be another."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _repeated(keys: Iterator[int]) -> set[int]:
    """The keys that come more than once.

    They are sorted by the million, on disk but for the last, and merged: a hundred million keys take 50 MB of memory
    and 800 of disk.
    """
    with ExitStack() as stack:
        runs: list[Iterable[int]] = []
        while run := sorted(islice(keys, RUN)):
            if len(run) < RUN:
                runs.append(run)
                break
            file = stack.enter_context(TemporaryFile())
            array("Q", run).tofile(file)
            runs.append(_read(file))
        return {key for key, after in pairwise(heapq.merge(*runs)) if key == after}


def _read(file: IO[bytes]) -> Iterator[int]:
    file.seek(0)
    while piece := file.read(_CHUNK):
        yield from array("Q", piece)


def refuse_bad_ids(inputs: Inputs, column: str | None) -> None:
    """Nothing runs where two answers could not be told apart.

    Raises:
        Refused: some rows have no name of their own; it lists them.
    """
    found = StoppingIds()
    for bad in bad_ids(inputs, column):
        found.take(bad.row, bad.message)
    found.refuse()


class StoppingIds(BaseModel):
    """Rows that stop a run, the first of them in words."""

    shown: list[str] = []
    count: int = 0

    def take(self, row: Row, message: str) -> None:
        """Count a row in."""
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(f"{where(row.file, file_and_line(row.line)[1])}: {message}")

    def refuse(self) -> None:
        """Do nothing where there are none.

        Raises:
            Refused: there are some; it lists them.
        """
        if self.count:
            more = f"; and {self.count - SHOWN:,} more" if self.count > SHOWN else ""
            raise Refused(
                f"{'; '.join(self.shown)}{more}. --bad-ids rows makes these rows errors and runs the others"
            )


class Unusable:
    """The rows that cannot be asked since they have no name of their own: sixteen bytes each, whatever they hold."""

    def __init__(self, bad: Iterable[BadId] = ()) -> None:
        """
        Args:
            bad: in the order of the input.
        """
        self._column = ""
        self._positions, self._firsts = array("Q"), array("Q")
        for one in bad:
            self._column = one.column
            self._positions.append(one.row.line)
            self._firsts.append(one.first)

    def fault(self, line: Line | BadRow) -> BadRow | None:
        """The entry of the error file for a line that is one of them; None: it is none."""
        at = bisect_left(self._positions, line.number)
        if at == len(self._positions) or self._positions[at] != line.number:
            return None
        row = parse(line) if isinstance(line, Line) else line
        if isinstance(row, BadRow):
            return row
        return row.bad(RowFault.INVALID_ID, BadId(row, self._column, self._firsts[at]).message)


def _is_batch(row: Row) -> bool:
    return "body" in row.columns and "prompt" not in row.columns and "messages" not in row.columns


def _kind(name: Any, there: bool) -> str:
    if not there:
        return "missing"
    return "empty" if name == "" else "null" if name is None else "no text"
