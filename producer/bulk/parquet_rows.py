"""Parquet as rows: a row becomes a JSON object, as strict JSON as its types allow.

timestamp, date, time    ISO 8601            decimal       text, every digit
binary                   base64              NaN, infinity null

A value that cannot be read (a text that is not UTF-8, a time of no calendar) is a fault of its row alone.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from producer.bulk.lines import BadRow, Line, Row, RowFault
from producer.refusal import Refused, first_line

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"PAR1"
_ROWS_AT_ONCE = 512
_BEYOND_ANY_CALENDAR = "<value out of range"
"""So begins Arrow's text of a time that it cannot write either."""


class _Unreadable(Exception):
    """A value that Python cannot hold; it stands in its column until its row is made."""

    def __init__(self, column: str, code: RowFault, why: str) -> None:
        super().__init__(f"{column}: {why}")
        self.code = code


def read_parquet(path: Path, after: int = 0) -> Iterator[Line | BadRow]:
    """The rows of a Parquet file; they are numbered from 1.

    Args:
        after: the number of a row: it and those before it are left out.

    Raises:
        Refused: it is damaged, names a column twice, has a time zone that this machine does not know, or pyarrow is
            not installed.
    """
    file = open_parquet(path)
    import pyarrow as pa

    _check_zones(path, file.schema_arrow)
    groups, number = groups_after(file, after)
    try:
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=groups):
            left_out = min(max(after - number, 0), batch.num_rows)
            number += left_out
            batch = batch.slice(left_out)
            columns = {
                name: _as_python(name, column)
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            }
            for values in zip(*columns.values(), strict=True):
                number += 1
                yield _row(number, dict(zip(columns, values, strict=True)))
    except (pa.ArrowException, OSError) as error:
        raise Refused(f"{path} is damaged after row {number:,}: {first_line(error)}") from None


def groups_after(file: Any, after: int) -> tuple[list[int], int]:
    """The row groups that hold rows after a row, and how many rows stand before them."""
    before = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if before + rows > after:
            return list(range(group, file.num_row_groups)), before
        before += rows
    return [], before


def count_parquet(path: Path) -> int:
    """How many rows a Parquet file has.

    Raises:
        Refused: as `read_parquet`.
    """
    return int(open_parquet(path).metadata.num_rows)


def open_parquet(path: Path) -> Any:
    """The file, for pyarrow.

    Raises:
        Refused: as `read_parquet`.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise Refused(f"{path} is Parquet: pip install 'millstream[files]'") from None
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} is not a Parquet file: {first_line(error)}") from None
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
        raise Refused(f"{path}: the column {twice!r} stands there twice")
    return file


def _check_zones(path: Path, schema: pa.Schema) -> None:
    import pyarrow as pa

    for field in schema:
        for type in _zoned(field.type):
            try:
                _as_python(field.name, pa.array([0], type))
            except pa.ArrowInvalid:
                raise Refused(
                    f"{path}: the column {field.name!r} has the time zone {type.tz!r}, which this machine does not "
                    "know: install tzdata"
                ) from None


def _zoned(type: pa.DataType) -> Iterator[pa.DataType]:
    """The types in a type that are times of a zone."""
    import pyarrow as pa

    if pa.types.is_timestamp(type) and type.tz is not None:
        yield type
    for number in range(type.num_fields):
        yield from _zoned(type.field(number).type)


def _as_python(name: str, column: pa.Array) -> list[Any]:
    """The values; in place of one that cannot be read, what is wrong with it."""
    import pyarrow as pa

    if pa.types.is_timestamp(column.type) and column.type.unit == "ns":  # Python's own stop at microseconds
        return [None if text is None else _iso(text) for text in column.cast(pa.string()).to_pylist()]
    try:
        values: list[Any] = column.to_pylist()
    except pa.ArrowException:
        raise
    except (ValueError, OverflowError):
        values = [_one(name, value) for value in column]
    return values


def _one(name: str, value: pa.Scalar) -> Any:
    import pyarrow as pa

    try:
        return value.as_py()
    except UnicodeDecodeError:
        return _Unreadable(name, RowFault.INVALID_UTF8, "a text is not UTF-8")
    except (ValueError, OverflowError) as error:
        if pa.types.is_timestamp(value.type) or pa.types.is_date(
            value.type
        ):  # Python's end with the year 9999
            text: str = value.cast(pa.string()).as_py()
            if not text.startswith(_BEYOND_ANY_CALENDAR):
                return _iso(text)
        return _Unreadable(name, RowFault.INVALID_ROW, f"a value cannot be read: {first_line(error)}")


def _iso(text: str) -> str:
    """Arrow's text of a timestamp in ISO 8601."""
    return text.replace(" ", "T", 1)


def _row(number: int, values: Mapping[str, Any]) -> Line | BadRow:
    try:
        return Line(number, _json({name: _plain(value) for name, value in values.items()}), kind="typed")
    except _Unreadable as fault:
        columns = {
            name: _plain(value) for name, value in values.items() if not isinstance(value, _Unreadable)
        }
        row = Row(number, Line(number, _json(columns)).digest, columns, "typed")
        return row.bad(fault.code, str(fault))


def _json(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode()


def _plain(value: Any) -> Any:
    """A value as JSON can say it."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(name): _plain(below) for name, below in value.items()}
        case list() | tuple():
            return [_plain(below) for below in value]
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case _Unreadable():
            raise value
    return str(value)
