"""Output and errors as Parquet: the input's columns with their types, and a fixed schema beside them.

all inputs Parquet    the columns are those of the input, read again: types, dictionaries, metadata stay
else                  the columns' types are read off the rows, in one pass before; where they do not agree, a
                      column holds JSON
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from producer.bulk.inputs import Inputs
from producer.bulk.lines import file_and_line, position
from producer.bulk.manifest import RowOrder
from producer.bulk.parquet_rows import groups_after, open_parquet
from producer.bulk.records import Record
from producer.refusal import Refused, first_line
from protocol import MillstreamError

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
"""Added to the columns of an answered row; `stop_reason` and `completions` hold JSON where they are not text."""
_ERROR = {
    "file": "string",
    "line": "int64",
    "custom_id": "string",
    "error_code": "string",
    "error_message": "string",
}
"""Before the columns of a row that failed. Inputs have `code` and `message` of their own, which stay beside these."""


class DoesNotFit(Exception):
    """A column has values that the type found for it cannot hold: it is to hold JSON, and the file begins anew."""

    def __init__(self, column: str) -> None:
        super().__init__(column)
        self.column = column


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
        MillstreamError: Arrow cannot write such rows.
    """
    _write(path, records, inputs, ANSWERS)


def write_errors(path: Path, records: Callable[[], Iterator[Record]], inputs: Inputs) -> None:
    """Write the error file: where a row stands and why it failed, then its columns.

    Raises: as `write_answers`.
    """
    _write(path, records, inputs, ERRORS)


def _write(path: Path, records: Callable[[], Iterator[Record]], inputs: Inputs, kind: Kind) -> None:
    read = columns_of(inputs)
    if read is not None:
        table = kind.table(read)
        _write_rows(path, records(), table, SourceRows(inputs, table))
        return
    types = Types(kind)
    for batch in batched(records()):
        types.take(batch)
    while True:
        try:
            _write_rows(path, records(), types.table(), None)
            return
        except DoesNotFit as fault:
            types.mixed.add(fault.column)


def _write_rows(path: Path, records: Iterator[Record], table: Table, source: SourceRows | None) -> None:
    import pyarrow.parquet as pq

    with arrow_faults(), pq.ParquetWriter(path, table.schema) as writer:
        for batch in batched(records):
            writer.write_table(table_of(table, batch, source))


@contextmanager
def arrow_faults() -> Iterator[None]:
    """Say in a line what Arrow cannot write, and what to do about it."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise MillstreamError(
            f"these rows cannot be written as Parquet: {first_line(error)}. What is answered is kept: "
            "--format jsonl writes it"
        ) from None


def batched(items: Iterator[T]) -> Iterator[list[T]]:
    """As many as make a row group."""
    while batch := list(islice(items, AT_ONCE)):
        yield batch


def table_of(table: Table, records: Sequence[Record], source: SourceRows | None) -> pa.Table:
    """Records as columns.

    Args:
        source: has the columns of the input, whose order the records follow; None: the records have them.

    Raises:
        DoesNotFit: a column that was read off the rows has to hold JSON.
        MillstreamError: a fixed column cannot hold what a record says there, as one of another program's may.
    """
    import pyarrow as pa

    rows = list(map(table.kind.row_of, records))
    read = source.take([record.line for record in records]) if source is not None else None
    arrays = []
    for field in table.schema:
        is_fixed = field.name in table.kind.fixed
        if read is not None and not is_fixed:
            arrays.append(read[field.name])
            continue
        cells = [row.get(field.name) for row in rows]
        if is_fixed:
            arrays.append(_fixed(field, cells))
        elif field.name in table.mixed:
            arrays.append(pa.array([json.dumps(cell, ensure_ascii=False) for cell in cells], field.type))
        else:
            arrays.append(_typed(field, cells))
    return pa.Table.from_arrays(arrays, schema=table.schema)


def _typed(field: pa.Field, cells: list[Any]) -> pa.Array:
    import pyarrow as pa

    try:
        return pa.array(cells, field.type)
    except pa.ArrowException:  # whole numbers above 2^53 where another batch has fractions
        raise DoesNotFit(field.name) from None


def _fixed(field: pa.Field, cells: list[Any]) -> pa.Array:
    """What is not text becomes JSON where text belongs."""
    import pyarrow as pa

    if pa.types.is_string(field.type):
        cells = [
            cell if cell is None or isinstance(cell, str) else json.dumps(cell, ensure_ascii=False)
            for cell in cells
        ]
    elif not all(cell is None or type(cell) is int for cell in cells):  # Arrow would cut 0.5 to 0
        raise _unfit(field)
    try:
        return pa.array(cells, field.type)
    except OverflowError:
        raise _unfit(field) from None


def _unfit(field: pa.Field) -> MillstreamError:
    return MillstreamError(
        f"a row's {field.name} is not of type {field.type}, as it is in Parquet: --format jsonl writes it"
    )


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
            cells = [row.get(name) for row in rows]
            try:
                found = pa.array(cells).type
                if any(_takes_truth_for_number(found, cell) for cell in cells):
                    raise pa.ArrowTypeError(f"{name} holds numbers and truth values")
                self._types[name] = _wider(self._types.get(name, pa.null()), found)
            except (pa.ArrowException, OverflowError):
                self.mixed.add(name)
                self._types[name] = pa.string()

    def table(self) -> Table:
        """What the file will hold. Parquet has no object without members: a column with nothing else holds JSON."""
        import pyarrow as pa

        mixed = self.mixed | {name for name, type in self._types.items() if _has_empty_object(type)}
        fields = [
            pa.field(name, pa.string() if name in mixed or pa.types.is_null(type) else type)
            for name, type in self._types.items()
        ]
        return self._kind.table(pa.schema(fields), mixed)


def _has_empty_object(type: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(type) and type.num_fields == 0:
        return True
    return any(_has_empty_object(type.field(number).type) for number in range(type.num_fields))


def _takes_truth_for_number(type: pa.DataType, cell: Any) -> bool:
    """Whether Arrow would write true as 1.0: behind a fraction it does, where it refuses any other mixture."""
    import pyarrow as pa

    if pa.types.is_floating(type):
        return isinstance(cell, bool)
    if pa.types.is_list(type) and cell is not None:
        return any(_takes_truth_for_number(type.value_type, item) for item in cell)
    if pa.types.is_struct(type) and cell is not None:
        return any(_takes_truth_for_number(field.type, cell.get(field.name)) for field in type)
    return False


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
    return {**row, "error_code": error["code"], "error_message": error["message"]}


ANSWERS = Kind(_ANSWER, _answer)
ERRORS = Kind(_ERROR, _flat_error)
