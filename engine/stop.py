"""Stop strings in a growing text.

    stops   "abcd" "bce" "c"       text   a  b  c         the text ends before "c": it is completed first
    stops   "abcd" "bcx"           text   a  b  c | e     "abc" may still become a stop string: held back, then sent
                                          ^^^^^^^

An automaton of all stop strings (Aho and Corasick, "Efficient string matching", 1975) is fed the text piece by piece.
Its state is the longest suffix of the text that begins a stop string, so nothing of the text is read twice: a piece
costs its own length and at most the longest stop string. Of the stop strings in a text, the one that is completed
first ends it; of several completed at the same character, the longest: the one that begins first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string that was completed."""

    stop: str
    end: int
    """Characters of the piece up to the end of it. It may begin before the piece."""


class StopStrings:
    """The automaton of some stop strings. It never changes: a text's place in it is a number, 0 at the beginning."""

    def __init__(self, stops: Iterable[str]) -> None:
        """
        Args:
            stops: none of them empty.
        """
        self._next: list[dict[str, int]] = [{}]
        """Of each state, the one that each character leads to: together, every beginning of every stop string."""
        self._shorter = [0]
        """The longest proper suffix of each state that is a state as well."""
        self._ending: list[str | None] = [None]
        """The longest stop string that ends with each state."""
        self._held = [0]
        """Characters of each state's longest suffix that can still become a stop string."""
        for stop in stops:
            self._add(stop)
        self._connect()

    def search(self, state: int, text: str) -> tuple[int, Match | None]:
        """Go on from a state by more text, up to the first stop string that is completed in it."""
        for index, character in enumerate(text):
            state = self._after(state, character)
            stop = self._ending[state]
            if stop is not None:
                return state, Match(stop, index + 1)
        return state, None

    def skip(self, state: int, text: str) -> int:
        """Go on from a state by text in which no stop string counts; one may begin there."""
        for character in text:
            state = self._after(state, character)
        return state

    def held(self, state: int) -> int:
        """How many of the text's last characters may begin a stop string: they are to be held back, no more."""
        return self._held[state]

    def _after(self, state: int, character: str) -> int:
        while (after := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._shorter[state]
        return after

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            after = self._next[state].get(character)
            if after is None:
                after = self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self._ending.append(None)
                self._held.append(0)
            state = after
        self._ending[state] = stop

    def _connect(self) -> None:
        """Fill in what a state knows of its suffixes, shorter states before longer ones."""
        queue = deque((state, 1) for state in self._next[0].values())
        while queue:
            state, length = queue.popleft()
            shorter = self._shorter[state]
            self._ending[state] = self._ending[state] or self._ending[shorter]
            self._held[state] = length if self._next[state] else self._held[shorter]
            for character, after in self._next[state].items():
                self._shorter[after] = self._after(shorter, character)
                queue.append((after, length + 1))


@lru_cache(maxsize=64)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of these stop strings; a dataset's rows mostly ask for the same ones."""
    return StopStrings(stops)
