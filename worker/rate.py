"""Tokens a second, lately."""

from __future__ import annotations

import time
from collections import deque

WINDOW_S = 20.0
MARK_EVERY_S = 0.1


class Rate:
    """A count that grows, and how fast it grew over the last seconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=int(WINDOW_S / MARK_EVERY_S))

    def note(self, count: int) -> None:
        """The count now; marks closer together than `MARK_EVERY_S` are left out."""
        now = time.monotonic()
        if not self._marks or now - self._marks[-1][0] >= MARK_EVERY_S:
            self._marks.append((now, count))

    def per_second(self) -> float:
        """Growth a second over the marks of the last `WINDOW_S` seconds; 0 if there are fewer than two."""
        now = time.monotonic()
        recent = [mark for mark in self._marks if now - mark[0] < WINDOW_S]
        if len(recent) < 2:
            return 0.0
        (start, first), (end, last) = recent[0], recent[-1]
        return (last - first) / (end - start)
