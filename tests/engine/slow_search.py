"""The slow, obvious search for stop strings: all text is kept and compared again at every character."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class SlowSearch:
    stops: tuple[str, ...]
    text: str = ""
    shown: list[bool] = field(default_factory=list)
    """Of each character."""

    def add(self, piece: str, shown: bool = True, counts: bool = True) -> tuple[str, int, int] | None:
        """The stop string completed first in the piece; how many shown characters are before it, and to its end."""
        for character in piece:
            self.text += character
            self.shown.append(shown)
            found = [place for stop in self.stops for place in self._ends_with(stop)]
            if found and counts:
                begin, _, stop = min(found)
                return stop, sum(self.shown[:begin]), sum(self.shown)
        return None

    def num_held(self) -> int:
        """Shown characters of the longest suffix, of either reading, that properly begins a stop string."""
        held = [0]
        for places in self._readings():
            for length in range(1, 1 + min(len(places), max(map(len, self.stops)) - 1)):
                tail = places[-length:]
                suffix = "".join(self.text[place] for place in tail)
                if any(stop != suffix and stop.startswith(suffix) for stop in self.stops):
                    held.append(sum(self.shown[place] for place in tail))
        return max(held)

    def _ends_with(self, stop: str) -> Iterator[tuple[int, int, str]]:
        for places in self._readings():
            tail = places[-len(stop) :]
            at_the_end = bool(tail) and tail[-1] == len(self.text) - 1
            if at_the_end and "".join(self.text[place] for place in tail) == stop:
                yield tail[0], -len(stop), stop

    def _readings(self) -> tuple[list[int], list[int]]:
        """Places of all characters, and of those that are shown."""
        everything = list(range(len(self.text)))
        return everything, [place for place in everything if self.shown[place]]
