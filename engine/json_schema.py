r"""A JSON Schema (Draft 2020-12) made ready for the grammar library, so that whatever comes out validates.

llguidance refuses what it does not know, with these exceptions, which are rewritten or refused here:

    format: date, time, date-time    29 February of any year, leap seconds of any minute     an exact `pattern`
    pattern, patternProperties       read as Rust reads them                                 regex.common
    two patternProperties that are one pattern, read so                                      refused
    minProperties of a map           a key that comes twice counts twice                     refused
    multipleOf: 0.1                  exact in decimals, while validators divide floats       refused; 0.5 is fine
    const, enum, pattern: "\x01"      control characters are passed over                     refused
    items: [...]                     read as `prefixItems`, as which it is no longer known   refused
    x-guidance                       its own settings                                        dropped
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine import regex
from engine.json_strings import strings

MAX_DEPTH = 64
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties")
_REFUSED = frozenset(
    (
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "additionalItems",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
        "$vocabulary",
    )
)
_DROPPED = frozenset(("$schema", "x-guidance"))
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONTROL_ESCAPE = re.compile(
    r"\\(?:[av]|[xu0]*[01][0-9a-fA-F](?![0-9a-fA-F])|[xu0]*7[fF])|" + _CONTROL.pattern
)

# Year 0 is left out: Python's dates, and with them jsonschema, begin with year 1.
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_EXACT_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


class SchemaError(ValueError):
    """A schema that cannot be kept; the message names the place and the reason."""


def prepare(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """The schema as llguidance is to see it; the one given is left as it is.

    Raises:
        SchemaError: a keyword that cannot be kept; the message names it and where it stands.
    """
    if isinstance(schema, bool):
        if not schema:
            raise SchemaError("schema: false allows nothing")
        return {}
    prepared = _prepare(schema, "schema", 0)
    assert isinstance(prepared, dict)
    return prepared


def _prepare(schema: Any, where: str, depth: int) -> dict[str, Any] | bool:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise SchemaError(f"{where}: a schema is an object or a boolean, not {type(schema).__name__}")
    if depth > MAX_DEPTH:
        raise SchemaError(f"schema: nested deeper than {MAX_DEPTH} schemas")
    prepared: dict[str, Any] = {}
    for keyword, value in schema.items():
        place = f"{where}.{keyword}"
        if keyword in _REFUSED:
            raise SchemaError(f"{place}: the keyword {keyword!r} is not supported")
        if keyword in _SINGLE:
            prepared[keyword] = _prepare(value, place, depth + 1)
        elif keyword in _LISTS and isinstance(value, list):
            prepared[keyword] = [_prepare(each, f"{place}[{i}]", depth + 1) for i, each in enumerate(value)]
        elif keyword in _MAPS and isinstance(value, dict):
            schemas = {name: _prepare(each, f"{place}.{name}", depth + 1) for name, each in value.items()}
            prepared[keyword] = (
                _by_common_pattern(schemas, place) if keyword == "patternProperties" else schemas
            )
        elif keyword not in _DROPPED:
            prepared[keyword] = _CHECKS.get(keyword, _as_it_is)(value, schema, place)
    return _exact_format(prepared)


def _by_common_pattern(schemas: dict[str, Any], place: str) -> dict[str, Any]:
    """Two patterns may have one translation, and the library would keep one of the schemas."""
    patterns: dict[str, str] = {}
    for name in schemas:
        before = patterns.setdefault(_pattern(name, {}, f"{place}.{name}"), name)
        if before != name:
            raise SchemaError(
                f"{place}: {before!r} and {name!r} are one pattern here; join their schemas under one"
            )
    return {pattern: schemas[name] for pattern, name in patterns.items()}


def _as_it_is(value: Any, _schema: dict[str, Any], _place: str) -> Any:
    return value


def _pattern(value: Any, _schema: dict[str, Any], place: str) -> str:
    if not isinstance(value, str):
        raise SchemaError(f"{place}: a string, not {type(value).__name__}")
    if _CONTROL_ESCAPE.search(value):
        raise SchemaError(f"{place}: control characters are not supported")
    try:
        return regex.common(value)
    except ValueError as error:
        raise SchemaError(f"{place}: {error}") from None


def _values(value: Any, _schema: dict[str, Any], place: str) -> Any:
    if any(map(_CONTROL.search, strings(value))):
        raise SchemaError(f"{place}: control characters other than \\b \\f \\n \\r \\t are not supported")
    return value


def _number(value: Any, _schema: dict[str, Any], place: str) -> Any:
    if isinstance(value, bool):
        raise SchemaError(f"{place}: a number, not a boolean (that was Draft 4)")
    return value


def _multiple_of(value: Any, schema: dict[str, Any], place: str) -> Any:
    """Only halves of halves: 19.99 / 0.01 is 1998.9999999999998, and 19.99 would not validate."""
    if isinstance(value, float) and value and (value * 1024) % 1:
        raise SchemaError(f"{place}: {value} has no exact binary form, so validators disagree; use a pattern")
    return _number(value, schema, place)


def _min_properties(value: Any, schema: dict[str, Any], place: str) -> Any:
    """A map's keys may come twice, and a parser keeps one; two required names are two."""
    required = schema.get("required")
    sure = len(set(required)) if isinstance(required, list) else 0
    if isinstance(value, int) and value > max(1, sure):
        raise SchemaError(f"{place}: more than the number of required properties is not supported")
    return value


def _reference(value: Any, _schema: dict[str, Any], place: str) -> Any:
    """A pointer past the keywords known here would find a schema that has not been prepared."""
    if isinstance(value, str) and value.startswith("#/"):
        first = value[2:].split("/", 1)[0]
        if first not in (*_LISTS, *_MAPS, *_SINGLE):
            raise SchemaError(f"{place}: {value!r} does not point to a schema; put it under $defs")
    return value


_CHECKS: dict[str, Callable[[Any, dict[str, Any], str], Any]] = {
    "const": _values,
    "enum": _values,
    "pattern": _pattern,
    "exclusiveMinimum": _number,
    "exclusiveMaximum": _number,
    "multipleOf": _multiple_of,
    "minProperties": _min_properties,
    "$ref": _reference,
}


def _exact_format(schema: dict[str, Any]) -> dict[str, Any]:
    named, others = schema.get("format"), schema.get("allOf", [])
    pattern = _EXACT_FORMATS.get(named) if isinstance(named, str) else None
    if pattern is None or not isinstance(others, list):  # the library says what is wrong with it
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword != "format"}
    if "pattern" not in rest:
        return {**rest, "pattern": pattern}
    return {**rest, "allOf": [*others, {"pattern": pattern}]}
