"""How deep JSON may be nested."""

from __future__ import annotations

from typing import Any

DEEPEST = 100
"""Levels. Python's own limit depends on who calls; what was read must also be writable, and the worker's parser
stops at 200 levels of the whole job."""


def deeper_than(value: Any, levels: int) -> bool:
    """Whether a value is nested deeper than that; without recursion, whatever it is."""
    front = [value]
    for _ in range(levels + 1):
        front = [
            below
            for above in front
            for below in (above.values() if isinstance(above, dict) else above)
            if isinstance(below, dict | list | tuple)
        ]
        if not front:
            return False
    return True
