"""Output and errors as Parquet: the input's columns with their types, and a fixed schema beside them.

all inputs Parquet    the columns are those of the input, read again: types, dictionaries, metadata stay
else                  the columns' types are read off the rows, in one pass before; where they do not agree, a
                      column holds JSON
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from producer.bulk.inputs import Inputs
from producer.bulk.lines import file_and_line, position
from producer.bulk.manifest import RowOrder
from producer.bulk.parquet_rows import groups_after, open_parquet
from producer.bulk.records import Record
from producer.refusal import Refused

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
ENDINGS = (".parquet", ".pq")
AT_ONCE = 2000
"""Rows of a row group."""
_ANSWER = {
    "completion": "string",
    "finish_reason": "string",
    "stop_reason": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "seed": "uint64",
    "completions": "string",
}
"""Added to the columns of an answered row; `stop_reason` and `completions` hold JSON where they are no text."""
_ERROR = {"file": "string", "line": "int64", "custom_id": "string", "code": "string", "message": "string"}


def is_parquet(output: Path) -> bool:
    """Whether a file of that name is to be Parquet."""
    return output.suffix.lower() in ENDINGS


def check_parquet(output: Path, inputs: Inputs, order: RowOrder) -> None:
    """Refuse what could not be written at the end.

    Raises:
        Refused: pyarrow is not installed, or columns would have to be read in another order than they stand in.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ModuleNotFoundError:
        raise Refused(f"{output} is Parquet: pip install 'millstream[files]'") from None
    if order == "completion" and _all_parquet(inputs):
        raise Refused(
            f"{output} takes its columns from Parquet inputs, which are read in their order: drop --order "
            "completion, or name an output of JSON lines"
        )


@dataclass(frozen=True, slots=True)
class Table:
    """What one of the two files will hold."""

    schema: pa.Schema
    """Of the columns that were read, then of the fixed ones."""
    kind: Kind
    mixed: frozenset[str] = frozenset()
    """Columns that hold JSON, since their values agree on no type."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the two files: which columns are always there, and what a record says in them."""

    fixed: dict[str, str]
    row_of: Callable[[Record], dict[str, Any]]

    def table(self, read: pa.Schema, mixed: Iterable[str] = ()) -> Table:
        """The columns that were read, and the fixed ones: after them in the output, before them in the error file."""
        import pyarrow as pa

        own = [pa.field(name, pa.type_for_alias(kind)) for name, kind in self.fixed.items()]
        columns = [field for field in read if field.name not in self.fixed]
        fields = [*columns, *own] if self is ANSWERS else [*own, *columns]
        return Table(pa.schema(fields, metadata=read.metadata), self, frozenset(mixed))


def write_answers(path: Path, records: Callable[[], Iterator[Record]], inputs: Inputs) -> None:
    """Write the output. `records` gives the answered rows in order, as often as it is asked.

    Raises:
        OSError: the disk did not take them.
    """
    _write(path, records, inputs, ANSWERS)


def write_errors(path: Path, records: Callable[[], Iterator[Record]], inputs: Inputs) -> None:
    """Write the error file: where a row stands and why it failed, then its columns.

    Raises:
        OSError: the disk did not take them.
    """
    _write(path, records, inputs, ERRORS)


def _write(path: Path, records: Callable[[], Iterator[Record]], inputs: Inputs, kind: Kind) -> None:
    import pyarrow.parquet as pq

    read = columns_of(inputs)
    source = None
    if read is None:
        types = Types(kind)
        for batch in batched(records()):
            types.take(batch)
        table = types.table()
    else:
        table = kind.table(read)
        source = SourceRows(inputs, table)
    with pq.ParquetWriter(path, table.schema) as writer:
        for batch in batched(records()):
            writer.write_table(table_of(table, batch, source))


def batched(items: Iterator[T]) -> Iterator[list[T]]:
    """As many as make a row group."""
    while batch := list(islice(items, AT_ONCE)):
        yield batch


def table_of(table: Table, records: Sequence[Record], source: SourceRows | None) -> pa.Table:
    """Records as columns.

    Args:
        source: has the columns of the input, whose order the records follow; None: the records have them.
    """
    import pyarrow as pa

    rows = list(map(table.kind.row_of, records))
    read = source.take([record.line for record in records]) if source is not None else None
    arrays = []
    for field in table.schema:
        if field.name in table.kind.fixed:
            values = [_fixed(row.get(field.name), field.type) for row in rows]
        elif read is not None:
            arrays.append(read[field.name])
            continue
        else:
            as_text = field.name in table.mixed
            cells = [row.get(field.name) for row in rows]
            values = [json.dumps(cell, ensure_ascii=False) for cell in cells] if as_text else cells
        arrays.append(pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=table.schema)


class Types:
    """The types of columns whose input does not tell them, as far as the rows were read."""

    def __init__(self, kind: Kind, read: pa.Schema | None = None, mixed: Iterable[str] = ()) -> None:
        """
        Args:
            read: what `schema` was at an earlier time.
        """
        self._kind = kind
        self._types: dict[str, pa.DataType] = (
            {} if read is None else dict(zip(read.names, read.types, strict=True))
        )
        self.mixed = set(mixed)
        """Columns that hold JSON, since their values agree on no type."""

    @property
    def schema(self) -> pa.Schema:
        """Of the columns that are not fixed; a column of nothing but nulls has the type null."""
        import pyarrow as pa

        return pa.schema(list(self._types.items()))

    def take(self, records: Sequence[Record]) -> None:
        """Widen the types so that they hold these rows."""
        import pyarrow as pa

        rows = list(map(self._kind.row_of, records))
        names = {name: None for row in rows for name in row if name not in self._kind.fixed}
        for name in names:
            if name in self.mixed:
                continue
            try:
                found = pa.array([row.get(name) for row in rows]).type
                self._types[name] = _wider(self._types.get(name, pa.null()), found)
            except (pa.ArrowException, OverflowError):
                self.mixed.add(name)
                self._types[name] = pa.string()

    def table(self) -> Table:
        """What the file will hold."""
        import pyarrow as pa

        fields = [
            pa.field(name, pa.string() if pa.types.is_null(type) else type)
            for name, type in self._types.items()
        ]
        return self._kind.table(pa.schema(fields), self.mixed)


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """A type that holds the values of both.

    Raises:
        pa.ArrowException: there is none.
    """
    import pyarrow as pa

    schemas = [pa.schema([("x", kind)]) for kind in (one, other)]
    return pa.unify_schemas(schemas, promote_options="permissive").field("x").type


def columns_of(inputs: Inputs) -> pa.Schema | None:
    """The columns of the inputs, where all of them are Parquet and agree."""
    if not _all_parquet(inputs):
        return None
    schemas = [open_parquet(path).schema_arrow for path in inputs.paths]
    first: pa.Schema = schemas[0]
    return first if all(schema.equals(first) for schema in schemas) else None


def _all_parquet(inputs: Inputs) -> bool:
    return all(one.format == "parquet" for one in inputs.inputs)


class SourceRows:
    """The input's rows, read along in order, batch by batch."""

    def __init__(self, inputs: Inputs, table: Table, after: int = 0) -> None:
        """
        Args:
            after: the position of a row: only those that follow it are wanted.
        """
        self._names = [name for name in table.schema.names if name not in table.kind.fixed]
        self._batches = self._read(inputs, after)
        self._first = self._end = 0
        self._batch: Any = None

    def take(self, lines: Sequence[int]) -> pa.Table:
        """The columns of rows in rising positions."""
        import pyarrow as pa

        parts, at = [], 0
        while at < len(lines):
            while not self._first <= lines[at] < self._end:
                self._first, self._batch = next(self._batches)
                self._end = self._first + self._batch.num_rows
            upto = at
            while upto < len(lines) and lines[upto] < self._end:
                upto += 1
            parts.append(self._batch.take(pa.array([line - self._first for line in lines[at:upto]])))
            at = upto
        return pa.Table.from_batches(parts).combine_chunks()

    def _read(self, inputs: Inputs, after: int) -> Iterator[tuple[int, Any]]:
        first_file, row = file_and_line(after)
        for number, path in enumerate(inputs.paths[first_file:], first_file):
            file = open_parquet(path)
            groups, before = groups_after(file, row if number == first_file else 0)
            first = position(number, before + 1)
            for batch in file.iter_batches(batch_size=AT_ONCE, columns=self._names, row_groups=groups):
                yield first, batch
                first += batch.num_rows


def _answer(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(record.payload)
    return row


def _flat_error(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(record.payload)
    error = row.pop("error")
    return {**row, "code": error["code"], "message": error["message"]}


ANSWERS = Kind(_ANSWER, _answer)
ERRORS = Kind(_ERROR, _flat_error)


def _fixed(value: Any, kind: pa.DataType) -> Any:
    """A value of a fixed column: what is no text becomes JSON where text belongs."""
    import pyarrow as pa

    if value is None or isinstance(value, str) or not pa.types.is_string(kind):
        return value
    return json.dumps(value, ensure_ascii=False)
