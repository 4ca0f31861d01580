r"""Regular expressions that mean the same to Python's `re` and in Rust's syntax.

The grammar library reads the second; users, and `jsonschema`, check with the first. What both accept is mostly one
language. Where it is not, the pattern is rewritten to the narrower reading or refused:

    \d \w \s        Unicode, of whatever version each has        ASCII
    \D \W \S        likewise                                     outside of what either calls \d \w \s
    [^\d] [^\S]     likewise, and there wider is narrower        the complements of those
    []-a]           a range / three characters                   the range
    a++ a*+ a?+     possessive / repeated twice                  refused
    [a&&b] [a[b]]   plain characters / set operations            refused
    (?i:[^i])       what is no variant of i is not agreed on     refused
    (?x:[a b])      a space, or no space                         refused
    (?i) (?s) ...   flags for the whole pattern                  refused
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_PARTS = re.compile(r"\\.|\(\?[aiLmsux]*-?[imsx]*:|[*+?}]\+|\[\^?\]?|.", re.DOTALL)
_NARROW = {
    r"\d": "[0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\s": r"[ \t\n\r\f\v]",
    r"\D": r"\P{Nd}",
    r"\W": r"[^\p{Alphabetic}\p{M}\p{N}\p{Pc}]",
    r"\S": r"[^\p{White_Space}\x1c-\x1f]",
}
_WIDE = {
    r"\d": r"\p{Nd}",
    r"\w": r"\p{Alphabetic}\p{M}\p{N}\p{Pc}",
    r"\s": r"\p{White_Space}\x1c-\x1f",
    r"\D": "[^0-9]",
    r"\W": "[^0-9A-Za-z_]",
    r"\S": r"[^ \t\n\r\f\v]",
}
"""For negated classes."""
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")


def common(pattern: str) -> str:
    """The pattern in Rust's syntax; it matches nothing that Python's `re` does not match.

    Raises:
        ValueError: Python cannot read it, or may read another thing in it; the message says what.
    """
    translated = "".join(_translated(pattern))
    try:
        flags = re.compile(pattern).flags
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if flags != re.UNICODE:
        raise ValueError("flags for the whole pattern, as in (?i), are not supported")
    return translated


def literal(text: str) -> str:
    """The pattern that matches this text alone."""
    return "".join("\\" + char if char in _SPECIAL else char for char in text)


def _translated(pattern: str) -> Iterator[str]:
    """Each part as it is to be written: escapes, beginnings of groups and classes, single characters."""
    parts: list[str] = _PARTS.findall(pattern)
    ignores_case = any(part.startswith("(?") and "i" in part for part in parts)
    opened = before = ""
    for part in parts:
        if opened:
            _check_in_class(part, before)
            yield (_WIDE if "^" in opened else _NARROW).get(part, part)
            if part == "]":
                opened = ""
        else:
            _check_outside(part, ignores_case)
            if part[0] == "[":
                opened = part
            yield part.replace("]", r"\]") if opened else _NARROW.get(part, part)
        before = part


def _check_in_class(part: str, before: str) -> None:
    if part[0] == "[":
        raise ValueError("ambiguous, escape it with a backslash: [ in a class of characters")
    if part == before and part in "-&~|":
        raise ValueError(f"ambiguous, escape it with a backslash: {part}{part} in a class of characters")


def _check_outside(part: str, ignores_case: bool) -> None:
    if part[0] in "*+?}" and len(part) == 2:
        raise ValueError(f"possessive repetition ({part}) is not supported")
    if part.startswith("(?") and "x" in part:
        raise ValueError(f"{part} is not supported: write it without spaces and comments")
    if part.startswith("[^") and ignores_case:
        raise ValueError("negated classes beside (?i:...) are not supported")
