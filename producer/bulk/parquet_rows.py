"""Parquet as rows: a row becomes a JSON object, as strict JSON as its types allow.

timestamp, date, time    ISO 8601            decimal       text, every digit
binary                   base64              NaN, infinity null
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from producer.bulk.lines import BadRow, Line, RowFault
from producer.refusal import Refused

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"PAR1"
_ROWS_AT_ONCE = 512


def read_parquet(path: Path, after: int = 0) -> Iterator[Line | BadRow]:
    """The rows of a Parquet file; they are numbered from 1.

    Args:
        after: the number of a row: it and those before it are left out.

    Raises:
        Refused: it is damaged, names a column twice, or pyarrow is not installed.
    """
    file = open_parquet(path)
    import pyarrow as pa

    groups, number = groups_after(file, after)
    try:
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=groups):
            left_out = min(max(after - number, 0), batch.num_rows)
            number += left_out
            batch = batch.slice(left_out)
            columns = {
                name: _as_python(column)
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            }
            for values in zip(*columns.values(), strict=True):
                number += 1
                row = dict(zip(columns, map(_plain, values), strict=True))
                yield _row(number, row)
    except (pa.ArrowException, OSError) as error:
        raise Refused(f"{path} is damaged after row {number:,}: {_line_of(error)}") from None


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
    except (pa.ArrowException, OSError) as error:
        raise Refused(f"{path} is no Parquet file: {_line_of(error)}") from None
    names = file.schema_arrow.names
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
        raise Refused(f"{path}: the column {twice!r} stands there twice")
    return file


def _as_python(column: pa.Array) -> list[Any]:
    import pyarrow as pa

    if pa.types.is_timestamp(column.type) and column.type.unit == "ns":  # Python's own stop at microseconds
        return [None if text is None else _iso(text) for text in column.cast(pa.string()).to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


def _iso(text: str) -> str:
    """Arrow's text of a timestamp in ISO 8601."""
    return text.replace(" ", "T", 1)


def _row(number: int, row: dict[str, Any]) -> Line | BadRow:
    raw = json.dumps(row, ensure_ascii=False, allow_nan=False)
    try:
        return Line(number, raw.encode(), kind="typed")
    except UnicodeEncodeError:
        digest = Line(number, raw.encode(errors="surrogatepass")).digest
        return BadRow(number, digest, None, RowFault.INVALID_UTF8, "a text is no UTF-8")


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
    return str(value)


def _line_of(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
