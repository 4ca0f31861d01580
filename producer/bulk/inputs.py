"""What a run reads: files, globs, standard input and URLs, as one sequence of rows.

    a.jsonl b.csv.gz 'more/*.parquet' - s3://bucket/c.jsonl
       |                              |         '--- copied beside the output for the time of the run, so that a
       |                              '------------- resumed run reads the same bytes as often as it must
       '--- read where they are

A row's position is its file's number and its line in it; see `lines.position`.
"""

from __future__ import annotations

import hashlib
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from glob import glob, has_magic
from pathlib import Path
from typing import BinaryIO, Literal

from msgspec import structs

from producer.bulk.csv_rows import csv_columns, read_csv
from producer.bulk.lines import BadRow, Line, RowFault, count_lines, file_and_line, position, read_lines
from producer.bulk.manifest import FileState
from producer.bulk.packed import open_unpacked
from producer.bulk.parquet_rows import MAGIC, count_parquet, open_parquet, read_parquet
from producer.refusal import Refused, first_line

Format = Literal["jsonl", "csv", "parquet"]
STDIN = "-"
MOST_COLUMNS_SHOWN = 20
_CHUNK = 1 << 20
_ENDINGS: dict[str, Format] = {".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_PACKED_ENDINGS = (".gz", ".gzip", ".zst", ".zstd")


@dataclass(frozen=True, slots=True)
class Input:
    """One of the things that a command names."""

    name: str
    """As the user wrote it."""
    path: Path | None
    """Where its bytes lie; None as long as it is standard input or a URL that was not copied."""
    format: Format


class Inputs:
    """Everything a run reads, in order."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self.inputs = tuple(inputs)
        self.torn: list[str] = []
        """What was found missing in the inputs that were read to their end."""

    @property
    def paths(self) -> list[Path]:
        """The files."""
        return [one.path for one in self.inputs if one.path is not None]

    def __str__(self) -> str:
        names = [one.name for one in self.inputs]
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"

    def rows(self, after: int = 0) -> Iterator[Line | BadRow]:
        """Every row that is not blank, in order.

        Args:
            after: a row's position: it and those before it are left out.

        Raises:
            Refused: an input cannot be read as what it is.
        """
        self.torn.clear()
        several = len(self.inputs) > 1
        first, line = file_and_line(after)
        for number, one in enumerate(self.inputs[first:], first):
            start = position(number, 0)
            for row in self._rows_of(one, line if number == first else 0):
                if several:
                    row = structs.replace(row, number=start + row.number, file=one.name)
                yield row

    def check_columns(self, wanted: Mapping[str, str | None]) -> None:
        """See that tables have the columns that a command names; lines of JSON may have any, each its own.

        Args:
            wanted: flags and what they name; None: not given.

        Raises:
            Refused: one is not there, or an input cannot be read as what it is.
        """
        for one in self.inputs:
            columns = _columns(one) if any(wanted.values()) else None
            if columns is None:
                continue
            for flag, column in wanted.items():
                if column is not None and column not in columns:
                    shown = ", ".join(columns[:MOST_COLUMNS_SHOWN]) or "none"
                    more = ", ..." if len(columns) > MOST_COLUMNS_SHOWN else ""
                    raise Refused(f"{one.name} has no column {column!r} ({flag}); its columns: {shown}{more}")

    def count(self) -> int:
        """How many rows there are: one pass over the bytes, for the progress display."""
        return sum(map(_count, self.inputs))

    def state(self) -> FileState:
        """What tells that the inputs are still those that we saw."""
        states = [FileState.of(path) for path in self.paths]
        if len(states) == 1:
            return states[0]
        digests = "".join(state.digest for state in states)
        digest = hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()
        return FileState(size=sum(state.size for state in states), digest=digest)

    def fetched(self, folder: Path) -> Inputs:
        """The same inputs, standard input and URLs copied into a folder.

        Raises:
            Refused: one cannot be read.
        """
        return Inputs(
            [
                one if one.path is not None else replace(one, path=_copy(one.name, _copy_of(folder, number)))
                for number, one in enumerate(self.inputs)
            ]
        )

    def drop_copies(self, folder: Path) -> None:
        """Delete what `fetched` has copied of these, or had begun to."""
        for number, one in enumerate(self.inputs):
            if one.path is None:
                _copy_of(folder, number).unlink(missing_ok=True)

    def _rows_of(self, one: Input, after: int) -> Iterator[Line | BadRow]:
        path = _there(one)
        if one.format == "parquet":
            yield from read_parquet(path, after)
            return
        file, torn = open_unpacked(path)
        with file:
            if one.format == "csv":
                yield from _without_torn_row(read_csv(file, one.name, after), torn)
            else:  # half of a JSON object is none, and so a fault of its own
                yield from read_lines(file, after)
        if (fault := torn()) is not None:
            self.torn.append(f"{one.name}: {fault}")


def find_inputs(names: Iterable[str], format: Format | None = None) -> Inputs:
    """The inputs that a command names; a glob stands for its files in the order of their names.

    Args:
        format: of all of them; None: by the end of each name, else JSON lines.

    Raises:
        Refused: one is not there, cannot be read, or is named twice.
    """
    found = [Input(name, path, format or _format_of(name, path)) for name, path in _expand(names)]
    if not found:
        raise Refused("there is no input")
    paths = [one.path.resolve() for one in found if one.path is not None]
    if twice := next((path for at, path in enumerate(paths) if path in paths[:at]), None):
        raise Refused(f"{twice} is named twice")
    if sum(one.name == STDIN for one in found) > 1:
        raise Refused("standard input is named twice")
    return Inputs(found)


def _columns(one: Input) -> list[str] | None:
    """Of a table; None of lines."""
    path = _there(one)
    if one.format == "parquet":
        return list(open_parquet(path).schema_arrow.names)
    if one.format != "csv":
        return None
    file, _ = open_unpacked(path)
    with file:
        return csv_columns(file, one.name)


def _count(one: Input) -> int:
    path = _there(one)
    if one.format == "parquet":
        return count_parquet(path)
    file, _ = open_unpacked(path)
    with file:
        return sum(1 for _ in read_csv(file, one.name)) if one.format == "csv" else count_lines(file)


def _expand(names: Iterable[str]) -> Iterator[tuple[str, Path | None]]:
    for name in names:
        if name == STDIN or "://" in name:
            yield name, None
        elif has_magic(name) and not Path(name).exists():
            matches = sorted(glob(name, recursive=True))
            if not matches:
                raise Refused(f"no file matches {name}")
            yield from ((match, _readable(match)) for match in matches if not Path(match).is_dir())
        else:
            yield name, _readable(name)


def _readable(name: str) -> Path:
    path = Path(name)
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(path.stat().st_mode):
                raise Refused(f"{name} is not a regular file")
            if file.read(4) == b"PK\x03\x04":
                raise Refused(f"{name} is zip: unpack it first")
    except (OSError, ValueError) as error:
        raise Refused(f"cannot read {name}: {_why(error)}") from None
    return path.resolve()


def _format_of(name: str, path: Path | None) -> Format:
    if path is not None:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return "parquet"
    bare = name.lower().split("?")[0]
    for ending in _PACKED_ENDINGS:
        bare = bare.removesuffix(ending)
    return _ENDINGS.get(Path(bare).suffix, "jsonl")


def _without_torn_row(
    rows: Iterator[Line | BadRow], torn: Callable[[], str | None]
) -> Iterator[Line | BadRow]:
    """The rows of a table of text; where it ends early, the last may be half a row that looks like a whole one."""
    last: Line | BadRow | None = None
    for row in rows:
        if last is not None:
            yield last
        last = row
    if last is not None and (fault := torn()) is not None:
        last = BadRow(last.number, last.digest, None, RowFault.INPUT_INCOMPLETE, fault)
    if last is not None:
        yield last


def _there(one: Input) -> Path:
    if one.path is None:
        raise RuntimeError(f"{one.name} was not copied")
    return one.path


def _copy_of(folder: Path, number: int) -> Path:
    return folder / f"input-{number}"


def _copy(name: str, place: Path) -> Path:
    with place.open("wb") as copy:
        for piece in _pieces_of(name):
            try:
                copy.write(piece)
            except OSError as error:  # which names nothing
                raise OSError(error.errno, error.strerror, str(place)) from None
    return place


def _pieces_of(name: str) -> Iterator[bytes]:
    """What standard input or a URL holds.

    Raises:
        Refused: it cannot be read. The libraries behind fsspec have faults of many classes, each its own.
    """
    try:
        with _opened(name) as source:
            yield from iter(lambda: source.read(_CHUNK), b"")
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"cannot read {name}: {_why(error)}") from None


def _opened(name: str) -> AbstractContextManager[BinaryIO]:
    if name == STDIN:
        return nullcontext(sys.stdin.buffer)
    try:
        import fsspec
    except ModuleNotFoundError:
        raise Refused(f"{name} is a URL: pip install 'millstream[files]'") from None
    opened: AbstractContextManager[BinaryIO] = fsspec.open(name, "rb")
    return opened


def _why(error: Exception) -> str:
    """What is wrong, in a line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "it is not there" if isinstance(error, FileNotFoundError) else first_line(error)
