"""Output and errors as Parquet: the input's columns with their types, and a fixed schema beside them.

all inputs Parquet    the columns are those of the input, read again: types, dictionaries, metadata stay
else                  the columns' types are read off the rows, in one pass before; where they do not agree, a
                      column holds JSON
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from producer.bulk.inputs import Inputs
from producer.bulk.lines import position
from producer.bulk.manifest import RowOrder
from producer.bulk.parquet_rows import open_parquet
from producer.bulk.records import Record
from producer.refusal import Refused

if TYPE_CHECKING:
    import pyarrow as pa

ENDINGS = (".parquet", ".pq")
_AT_ONCE = 2000
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
    fixed: dict[str, str]
    mixed: frozenset[str]
    """Columns that hold JSON, since their values agree on no type."""


def write_answers(path: Path, records: Callable[[], Iterator[Record]], inputs: Inputs) -> None:
    """Write the output. `records` gives the answered rows in order, as often as it is asked.

    Raises:
        OSError: the disk did not take them.
    """
    _write(path, records, inputs, _ANSWER, _answer)


def write_errors(path: Path, records: Callable[[], Iterator[Record]], inputs: Inputs) -> None:
    """Write the error file: where a row stands and why it failed, then its columns.

    Raises:
        OSError: the disk did not take them.
    """
    _write(path, records, inputs, _ERROR, _flat_error)


def _write(
    path: Path,
    records: Callable[[], Iterator[Record]],
    inputs: Inputs,
    fixed: dict[str, str],
    row_of: Callable[[Record], dict[str, Any]],
) -> None:
    import pyarrow.parquet as pq

    read = _from_inputs(inputs)
    table = _table(read, map(row_of, records()), fixed)
    source = _SourceRows(inputs, table) if read is not None else None
    left = records()
    with pq.ParquetWriter(path, table.schema) as writer:
        while batch := list(islice(left, _AT_ONCE)):
            rows = list(map(row_of, batch))
            writer.write_table(_columns(table, rows, source, [record.line for record in batch]))


def _columns(
    table: Table, rows: Sequence[dict[str, Any]], source: _SourceRows | None, lines: Sequence[int]
) -> pa.Table:
    import pyarrow as pa

    read = source.take(lines) if source is not None else None
    arrays = []
    for field in table.schema:
        if field.name in table.fixed:
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


def _table(read: pa.Schema | None, rows: Iterator[dict[str, Any]], fixed: dict[str, str]) -> Table:
    import pyarrow as pa

    mixed: frozenset[str] = frozenset()
    if read is None:
        read, mixed = _inferred(rows, fixed)
    own = [pa.field(name, pa.type_for_alias(kind)) for name, kind in fixed.items()]
    columns = [field for field in read if field.name not in fixed]
    fields = [*columns, *own] if fixed is _ANSWER else [*own, *columns]
    return Table(pa.schema(fields, metadata=read.metadata), fixed, mixed)


def _inferred(rows: Iterator[dict[str, Any]], fixed: dict[str, str]) -> tuple[pa.Schema, frozenset[str]]:
    """The type of each column over all rows."""
    import pyarrow as pa

    types: dict[str, pa.DataType] = {}
    mixed: set[str] = set()
    while batch := list(islice(rows, _AT_ONCE)):
        names = {name: None for row in batch for name in row if name not in fixed}
        for name in names:
            if name in mixed:
                continue
            try:
                found = pa.array([row.get(name) for row in batch]).type
                types[name] = _wider(types.get(name, pa.null()), found)
            except (pa.ArrowException, OverflowError):
                mixed.add(name)
                types[name] = pa.string()
    fields = [pa.field(name, pa.string() if pa.types.is_null(kind) else kind) for name, kind in types.items()]
    return pa.schema(fields), frozenset(mixed)


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """A type that holds the values of both.

    Raises:
        pa.ArrowException: there is none.
    """
    import pyarrow as pa

    schemas = [pa.schema([("x", kind)]) for kind in (one, other)]
    return pa.unify_schemas(schemas, promote_options="permissive").field("x").type


def _from_inputs(inputs: Inputs) -> pa.Schema | None:
    """The columns of the inputs, where all of them are Parquet and agree."""
    if not _all_parquet(inputs):
        return None
    schemas = [open_parquet(path).schema_arrow for path in inputs.paths]
    first: pa.Schema = schemas[0]
    return first if all(schema.equals(first) for schema in schemas) else None


def _all_parquet(inputs: Inputs) -> bool:
    return all(one.format == "parquet" for one in inputs.inputs)


class _SourceRows:
    """The input's rows, read along in order, batch by batch."""

    def __init__(self, inputs: Inputs, table: Table) -> None:
        self._names = [name for name in table.schema.names if name not in table.fixed]
        self._batches = self._read(inputs)
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

    def _read(self, inputs: Inputs) -> Iterator[tuple[int, Any]]:
        for number, path in enumerate(inputs.paths):
            first = position(number, 1)
            for batch in open_parquet(path).iter_batches(batch_size=_AT_ONCE, columns=self._names):
                yield first, batch
                first += batch.num_rows


def _answer(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(record.payload)
    return row


def _flat_error(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(record.payload)
    error = row.pop("error")
    return {**row, "code": error["code"], "message": error["message"]}


def _fixed(value: Any, kind: pa.DataType) -> Any:
    """A value of a fixed column: what is no text becomes JSON where text belongs."""
    import pyarrow as pa

    if value is None or isinstance(value, str) or not pa.types.is_string(kind):
        return value
    return json.dumps(value, ensure_ascii=False)
