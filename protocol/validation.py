"""What pydantic finds wrong with an input, in the words of a user: the field, what it takes, the value it had."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

MAX_FAULTS = 8
"""Most faults told of one input: a prompt may be a list of 100,000 wrong ids."""
LONGEST_SHOWN = 60
"""Letters of a value that a message shows: schemas, tools and templates are long."""

_TAKES = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "list": "a list",
    "tuple": "a list",
    "dict": "an object",
    "model": "an object",
    "bool": "true or false",
    "string": "text",
}
"""By the first word of the fault's type: `int_type`, `int_parsing` and `int_from_float` take the same."""
_BOUNDS = {
    "greater_than_equal": ("ge", "{} or more"),
    "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "at most {}"),
    "less_than": ("lt", "less than {}"),
}
_PROMPT = "text or a list of token ids, or a list of either"
_CHARACTERS = re.compile(r"\^\[A-Za-z0-9(?P<others>[^\]]*)\]\{(?P<least>\d+),(?P<most>\d+)\}\$")
"""How patterns of names are written."""
_OF_WHOLES = frozenset({"too_short", "value_error"})
"""They say what is wrong inside a list or an object: it does not help to hear that it is one."""
_BRANCHES = frozenset({"str", "bool", "list[TextPart]", "dict[str,any]", "constrained-int"})
"""What pydantic calls the sides of our unions in its paths; users know fields."""


def describe_validation(error: Any) -> str:
    """One line from a pydantic `ValidationError`: each field, what is wrong with it, and the value it had."""
    faults: dict[tuple[str, ...], list[Any]] = {}
    for item in error.errors(include_url=False):
        faults.setdefault(_path(item["loc"]), []).append(item)
    # A list with a wrong item is said to be too short as well, and a union says what else it would have taken.
    wholes = {path[:length] for path in faults for length in range(1, len(path))}
    lines = [_describe(".".join(path), items) for path, items in faults.items() if path not in wholes]
    more = [f"and {len(lines) - MAX_FAULTS} more"] if len(lines) > MAX_FAULTS else []
    return "; ".join(lines[:MAX_FAULTS] + more)


def shortened(text: str) -> str:
    """A value for a message: a line that any stream can write."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def _path(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    path = [str(part) for part in loc if part not in _BRANCHES]
    for union in ("prompt", "response_format"):
        if union in path[:2]:
            del path[path.index(union) + 1 : path.index(union) + 2]  # which of its kinds it was read as
    return tuple(path)


def _describe(where: str, items: list[Any]) -> str:
    item = items[0]
    match item["type"]:
        case "missing":
            return f"{where} is missing"
        case "extra_forbidden":
            return f"{where}: no such parameter"
        case "union_tag_not_found":
            return f"{where}.type is missing"
        case "union_tag_invalid":
            return (
                f"{where}.type: give one of {item['ctx']['expected_tags']}, not {_shown(item['ctx']['tag'])}"
            )
    takes = dict.fromkeys(_takes(where, one) for one in items)
    words = str(item["msg"]).removeprefix("Value error, ") if None in takes else _give(takes)
    told = f"{where}: {words}" if where else words
    is_whole = isinstance(item["input"], dict | list | tuple | BaseModel)
    return told if is_whole and item["type"] in _OF_WHOLES else f"{told}, not {_shown(item['input'])}"


def _give(takes: Mapping[str | None, None]) -> str:
    return f"give {', or '.join(map(str, takes))}"


def _takes(where: str, item: Any) -> str | None:
    """What would have been right; None where the fault has words of its own."""
    kind, context = item["type"], item.get("ctx", {})
    if where == "prompt" and kind == "list_type":
        return _PROMPT
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return words.format(_number(context[name]))
    if kind in ("too_short", "string_too_short"):
        return "a list that is not empty" if kind == "too_short" else "text that is not empty"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "string_pattern_mismatch":
        return _characters(context["pattern"])
    return _TAKES.get(kind.partition("_")[0])


def _characters(pattern: str) -> str | None:
    """`^[A-Za-z0-9._-]{1,100}$` in words."""
    if (found := _CHARACTERS.fullmatch(pattern)) is None:
        return None
    *others, last = [f"'{one}'" for one in found["others"]]
    return f"{found['least']} to {found['most']} letters, digits, {', '.join(others)} and {last}"


def _number(bound: float) -> str:
    return str(int(bound) if bound == int(bound) else bound)


def _shown(value: Any) -> str:
    if isinstance(value, dict | list | tuple):  # it may be of any size and depth
        return "an object" if isinstance(value, dict) else "a list"
    return shortened(repr(value))
