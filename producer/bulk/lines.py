"""The input, line by line: physical numbers, bounded memory, and each line either a row or a fault of its own.

Faults never reach the neighbours: they become entries of the error file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, BinaryIO, Literal, NoReturn

import msgspec

from producer.nesting import DEEPEST, deeper_than

BOM = b"\xef\xbb\xbf"
LONGEST_LINE = 32 << 20
"""Bytes. A prompt holds at most 4 MiB; escapes (six bytes a character) and other columns come on top."""
BLANK = b" \t\r\n"
_LINE_BITS = 40

Kind = Literal["json", "text", "typed"]
"""What a row's values are: as JSON says; text, whatever it means (CSV); of one schema for all rows, where what a row
lacks is null (Parquet)."""


class RowFault(StrEnum):
    """Stable names for what is wrong with a row before it can be a job, beside `protocol.ErrorCode`; they stand in
    error files."""

    INVALID_JSON = "invalid_json"
    INVALID_ROW = "invalid_row"
    INVALID_UTF8 = "invalid_utf8"
    INVALID_CSV = "invalid_csv"
    LINE_TOO_LONG = "line_too_long"
    INVALID_ID = "invalid_id"
    INPUT_INCOMPLETE = "input_incomplete"


def position(file: int, line: int) -> int:
    """Where a row stands in all of a run's inputs; with one input, its line."""
    return file << _LINE_BITS | line


def file_and_line(position: int) -> tuple[int, int]:
    """The number of a position's file, from 0, and the line in it."""
    return position >> _LINE_BITS, position & (1 << _LINE_BITS) - 1


def where(file: str | None, line: int) -> str:
    """Where a row stands, in a message; `file` where a run has several."""
    return f"line {line}" if file is None else f"{file}, line {line}"


class Line(msgspec.Struct, frozen=True, gc=False):
    """A line that is not blank, without byte order mark, surrounding blanks and line end; or a row of a table,
    written as such a line. (A `Struct` takes a fifth of the time that a frozen dataclass takes to be made.)
    """

    number: int
    """Physical, from 1; in a run its position."""
    raw: bytes
    too_long: bool = False
    kind: Kind = "json"
    file: str | None = None
    """The input it stands in, where a run has several."""

    @property
    def digest(self) -> str:
        """What tells whether a line was changed between two runs: 64 bits of BLAKE2b, hex."""
        return hashlib.blake2b(self.raw, digest_size=8).hexdigest()


class Row(msgspec.Struct, frozen=True):
    """A line that holds a JSON object."""

    line: int
    """Its position."""
    digest: str
    columns: dict[str, Any]
    kind: Kind = "json"
    file: str | None = None
    raw: bytes = b""
    """The object as it stands in the line."""

    @property
    def custom_id(self) -> Any:
        """The user's own name for the row; None without one. Never used as a key."""
        return self.columns.get("custom_id", self.columns.get("id"))

    def bad(self, code: str, message: str) -> BadRow:
        """The same row as one that has no answer."""
        return BadRow(self.line, self.digest, self.custom_id, code, message, self.columns, self.file)


class BadRow(msgspec.Struct, frozen=True):
    """A line that cannot be asked: an entry of the error file."""

    number: int
    """As a `Line`'s."""
    digest: str
    custom_id: Any
    code: str
    message: str
    columns: dict[str, Any] = {}
    file: str | None = None

    @property
    def line(self) -> int:
        """The line in its file."""
        return file_and_line(self.number)[1]


def read_lines(file: BinaryIO, after: int = 0) -> Iterator[Line]:
    """The lines of a JSONL file that are not blank. Files joined with `cat` may bring a byte order mark each.

    Args:
        after: the number of a line: it and those before it are left out.
    """
    return (Line(number, raw, too_long) for number, raw, too_long in _read(file, after))


def count_lines(file: BinaryIO) -> int:
    """How many lines `read_lines` gives."""
    return sum(1 for _ in _read(file))


def _read(file: BinaryIO, after: int = 0) -> Iterator[tuple[int, bytes, bool]]:
    number = 0
    while number < after and (piece := file.readline(LONGEST_LINE)):
        number += piece.endswith(b"\n")
    while piece := file.readline(LONGEST_LINE + 1):
        number += 1
        too_long = len(piece) > LONGEST_LINE
        if too_long:
            _skip_rest(file, piece)
        raw = piece
        while raw.startswith(BOM):
            raw = raw[len(BOM) :]
        if raw := raw.strip(BLANK):
            yield number, raw, too_long


def _skip_rest(file: BinaryIO, piece: bytes) -> None:
    while piece and not piece.endswith(b"\n"):
        piece = file.readline(LONGEST_LINE)


def parse(line: Line) -> Row | BadRow:
    """The row of a line, or what is wrong with it. Nothing is repaired, nothing guessed."""
    columns = _clean_object(line)
    if columns is None:
        try:
            columns = _parse_object(line)
        except _Fault as fault:
            custom_id = _readable_id(line)
            return BadRow(line.number, line.digest, custom_id, fault.code, str(fault), file=line.file)
    return Row(line.number, line.digest, columns, line.kind, line.file, line.raw)


def _clean_object(line: Line) -> dict[str, Any] | None:
    """The object of a line without any fault, in a tenth of the time; None: read it as `_parse_object` does.

    msgspec is as strict (NaN, 1e999, half a character, invalid UTF-8 are refused), but of two members with one name
    it keeps the last. Each member has a colon, and what strings hold of them stays, so one that is lost shows when
    the object is written again and the colons are counted.
    """
    raw = line.raw
    if line.too_long or b"\\u003a" in raw or b"\\u003A" in raw:
        return None
    if raw.count(b"[") + raw.count(b"{") > DEEPEST:
        return None
    try:
        value = msgspec.json.decode(raw)
        written = msgspec.json.encode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    clean = isinstance(value, dict) and raw.count(b":") == written.count(b":")
    return value if clean else None


class _Fault(Exception):
    def __init__(self, code: RowFault, message: str) -> None:
        super().__init__(message)
        self.code = code


def _parse_object(line: Line) -> dict[str, Any]:
    if line.too_long:
        raise _Fault(RowFault.LINE_TOO_LONG, f"the line has more than {LONGEST_LINE:,} bytes")
    try:
        value = _STRICT.decode(line.raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _Fault(
            RowFault.INVALID_UTF8, f"byte {error.start + 1} of the line is no UTF-8 ({error.reason})"
        ) from None
    except json.JSONDecodeError as error:
        raise _Fault(RowFault.INVALID_JSON, f"no JSON: {error.msg} (character {error.pos + 1})") from None
    except RecursionError:
        raise _Fault(RowFault.INVALID_JSON, f"nested more than {DEEPEST} levels deep") from None
    except ValueError as error:  # an integer of thousands of digits
        raise _Fault(RowFault.INVALID_JSON, str(error).partition(";")[0]) from None
    if not isinstance(value, dict):
        raise _Fault(
            RowFault.INVALID_ROW, f"a row is a JSON object in a line of its own, this is {_kind(value)}"
        )
    _check_writable(line.raw, value)
    return value


def _check_writable(raw: bytes, value: dict[str, Any]) -> None:
    """Refuse what JSON can say and a JSONL file in UTF-8 cannot, or not safely."""
    if raw.count(b"[") + raw.count(b"{") > DEEPEST and deeper_than(value, DEEPEST):
        raise _Fault(RowFault.INVALID_JSON, f"nested more than {DEEPEST} levels deep")
    if b"\\u" in raw:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _Fault(
                RowFault.INVALID_JSON, "half a character (a lone surrogate), which UTF-8 cannot carry"
            ) from None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "a number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise _Fault(RowFault.INVALID_JSON, f"the key {twice!r} stands there twice")
    return members


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Fault(RowFault.INVALID_JSON, f"the number {text} is too large")
    return value


def _constant(name: str) -> NoReturn:
    raise _Fault(RowFault.INVALID_JSON, f"{name} is no JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)


def _readable_id(line: Line) -> Any:
    """The `custom_id` of a bad line where it can be read; for the user's eyes only."""
    if line.too_long:
        return None
    try:
        value = json.loads(line.raw.decode("utf-8", "replace"))
        custom_id = Row(line.number, "", value).custom_id if isinstance(value, dict) else None
        json.dumps(
            custom_id, ensure_ascii=False, allow_nan=False
        ).encode()  # the error file must be able to hold it
    except (ValueError, RecursionError):
        return None
    return custom_id
