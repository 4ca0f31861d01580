r"""Regular expressions that mean the same to Python's `re` and in Rust's syntax.

The grammar library reads the second; users, and `jsonschema`, check with the first. What both accept is mostly one
language. Where it is not, the pattern is rewritten to the narrower reading or refused:

    \d \w \s        Unicode, of whatever version each has        ASCII
    \D \W \S        likewise                                     outside of what either calls \d \w \s
    a++ a*+ a?+     possessive / repeated twice                  refused
    [a&&b] [[a]]    plain characters / set operations            refused
    (?i) (?s) ...   flags for the whole pattern                  refused
"""

from __future__ import annotations

import re
import warnings

_PARTS = re.compile(r"\\.|[*+?}]\+|\[:|.", re.DOTALL)
_CLASSES = {
    r"\d": "[0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\s": r"[ \t\n\r\f\v]",
    r"\D": r"\P{Nd}",
    r"\W": r"[^\p{Alphabetic}\p{M}\p{N}\p{Pc}]",
    r"\S": r"[^\p{White_Space}\x1c-\x1f]",
}
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")


def common(pattern: str) -> str:
    """The pattern in Rust's syntax; it matches nothing that Python's `re` does not match.

    Raises:
        ValueError: Python cannot read it, or may read another thing in it; the message says what.
    """
    _check_python(pattern)
    return "".join(_CLASSES.get(part, part) for part in _parts(pattern))


def literal(text: str) -> str:
    """The pattern that matches this text alone."""
    return "".join("\\" + char if char in _SPECIAL else char for char in text)


def _check_python(pattern: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flags = re.compile(pattern).flags
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    except Warning as warning:
        raise ValueError(f"ambiguous, escape it with a backslash: {warning}") from None
    if flags != re.UNICODE:
        raise ValueError("flags for the whole pattern, as in (?i), are not supported")


def _parts(pattern: str) -> list[str]:
    """Escapes, possessive marks and single characters, in order."""
    parts: list[str] = _PARTS.findall(pattern)
    in_class = False
    for part in parts:
        if part == "[:" and in_class:
            raise ValueError("named classes, as in [[:alpha:]], are not supported")
        if part[0] in "*+?}" and len(part) == 2 and not in_class:
            raise ValueError(f"possessive repetition ({part}) is not supported")
        if part[0] == "[":
            in_class = True
        elif part == "]":
            in_class = False
    return parts
