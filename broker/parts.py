"""Work for the server, cut into parts: a script holds the server up while it runs, and has its part in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

AT_ONCE = 128
"""Jobs that one script stores, publishes or ends: 3.5 to 5 ms of the server's time."""
BYTES_AT_ONCE = 1 << 20
"""Of their payloads, events and results; one job may have more."""


def in_parts(
    items: Iterable[T], size_of: Callable[[T], int], most: int = AT_ONCE, most_bytes: int = BYTES_AT_ONCE
) -> Iterator[list[T]]:
    """The items in order, in lists of at most `most` and `most_bytes`; none is empty, one item may be larger."""
    part: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if part and (len(part) == most or total + size > most_bytes):
            yield part
            part, total = [], 0
        part.append(item)
        total += size
    if part:
        yield part
