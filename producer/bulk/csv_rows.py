"""CSV as rows: the cells are text and stay so; a row becomes the JSON object of its columns.

What is not CSV is a fault of its row alone. A quote that is never closed takes all that follows it along: one row,
at the line where it opened.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from producer.bulk.lines import LONGEST_LINE, BadRow, Line, RowFault
from producer.refusal import Refused


def read_csv(file: BinaryIO, name: str, after: int = 0) -> Iterator[Line | BadRow]:
    """The rows of a CSV file in UTF-8, a header first; numbers are those of the line where a row begins.

    Args:
        after: the number of a row: it and those before it are left out.

    Raises:
        Refused: the header names no columns, or one twice.
    """
    reader = _reader(file)
    header = _header(reader, name)
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as fault:
            if number > after:
                yield _bad(number, "", RowFault.INVALID_CSV, str(fault))
            continue
        if cells and number > after:
            yield _row(number, header, cells)


def csv_columns(file: BinaryIO, name: str) -> list[str]:
    """The names of its columns. Raises as `read_csv`."""
    return _header(_reader(file), name)


def _reader(file: BinaryIO) -> Any:
    csv.field_size_limit(LONGEST_LINE)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    return csv.reader(text, strict=True)


def _header(reader: Iterator[list[str]], name: str) -> list[str]:
    try:
        header = next(reader, [])
    except csv.Error as fault:
        raise Refused(f"{name}: the header is not CSV: {fault}") from None
    if twice := next((column for at, column in enumerate(header) if column in header[:at]), None):
        raise Refused(f"{name}: the column {twice!r} stands there twice")
    return header


def _row(number: int, header: list[str], cells: list[str]) -> Line | BadRow:
    if len(cells) != len(header):
        return _bad(
            number, "\0".join(cells), RowFault.INVALID_CSV, f"{len(cells)} cells under {len(header)} columns"
        )
    raw = json.dumps(dict(zip(header, cells, strict=True)), ensure_ascii=False)
    try:
        encoded = raw.encode()
    except UnicodeEncodeError:
        return _bad(number, raw, RowFault.INVALID_UTF8, "a cell is not UTF-8")
    if len(encoded) > LONGEST_LINE:
        return _bad(number, raw, RowFault.LINE_TOO_LONG, f"the row has more than {LONGEST_LINE:,} bytes")
    return Line(number, encoded, kind="text")


def _bad(number: int, content: str, code: RowFault, message: str) -> BadRow:
    digest = Line(number, content.encode(errors="surrogateescape")).digest
    return BadRow(number, digest, None, code, message)
