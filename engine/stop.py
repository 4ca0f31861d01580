"""Stop strings in a growing text.

    stops   "abcd" "bce" "c"       text   a  b  c         the text ends before "c": it is completed first
    stops   "abcd" "bcx"           text   a  b  c | e     "abc" may still become a stop string: held back, then sent
                                          ^^^^^^^

An automaton of all stop strings (Aho and Corasick, "Efficient string matching", 1975) is fed the text piece by piece.
Its state is the longest suffix of the text that begins a stop string, so nothing of the text is read twice: a piece
costs its own length and at most the longest stop string. Of the stop strings in a text, the one that is completed
first ends it; of several completed at the same character, the longest: the one that begins first.

A text may have parts that are not shown. It is read twice then, with them and without, and ends at what is completed
first in either reading.

    stops   "b#" "ab"       text   a  #  b          "#" is hidden: "ab" is completed in what is shown
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

_SHOWN, _HIDDEN = "s", "h"


class Found(NamedTuple):
    """A stop string that was completed in a piece of text."""

    end: int
    """Characters of the piece up to the end of it. It may begin before the piece."""
    num_shown: int
    """How many of its characters are shown."""
    stop: str


class StopSearch:
    """The search in one text, given piece by piece."""

    __slots__ = ("_all", "_shown")

    def __init__(self, stops: tuple[str, ...]) -> None:
        """
        Args:
            stops: none of them empty.
        """
        self._shown = _Reading(_automaton(stops))
        self._all: _Reading | None = None
        """Reads what is hidden too; there from the first hidden piece on."""

    def show(self, piece: str, counts: bool = True) -> Found | None:
        """Go on by text that is shown, up to the first stop string that is completed in it.

        Args:
            piece: what follows.
            counts: whether stop strings completed in it count; they may begin in it in any case.
        """
        found = self._shown.read(piece, _SHOWN, counts)
        if self._all is None:
            return found
        both = found, self._all.read(piece, _SHOWN, counts)
        return min(
            filter(None, both), key=lambda one: (one.end, -one.num_shown, -len(one.stop)), default=None
        )

    def hide(self, piece: str, counts: bool = True) -> Found | None:
        """Go on by text that is not shown."""
        if self._all is None:
            self._all = self._shown.copy()
        return self._all.read(piece, _HIDDEN, counts)

    @property
    def num_held(self) -> int:
        """How many of the last shown characters may belong to a stop string: they are to be held back, no more."""
        if self._all is None:
            return self._shown.num_shown
        return max(self._shown.num_shown, self._all.num_shown)


class _Reading:
    """How far one reading of a text has got."""

    __slots__ = ("_automaton", "_marks", "_state")

    def __init__(self, automaton: _Automaton, state: int = 0, marks: str = "") -> None:
        self._automaton = automaton
        self._state = state
        self._marks = marks
        """Which of the last characters are shown, for as many as may become part of a stop string."""

    def copy(self) -> _Reading:
        return _Reading(self._automaton, self._state, self._marks)

    @property
    def num_shown(self) -> int:
        return self._marks.count(_SHOWN)

    def read(self, piece: str, mark: str, counts: bool) -> Found | None:
        automaton = self._automaton
        if self._state == 0 and automaton.firsts.isdisjoint(piece):  # most pieces: 1 us in place of 3
            return None
        for index, character in enumerate(piece, 1):
            self._state = automaton.after(self._state, character)
            stop = automaton.ending[self._state]
            if stop is not None and counts:
                marks = self._marks + mark * index
                return Found(index, marks[-len(stop) :].count(_SHOWN), stop)
        held = automaton.held[self._state]
        marks = self._marks + mark * len(piece)
        self._marks = marks[len(marks) - held :]
        return None


class _Automaton:
    """The automaton of some stop strings; it never changes. A text's place in it is a number, 0 at the beginning."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        """Of each state, the one that each character leads to: together, every beginning of every stop string."""
        self._shorter = [0]
        """The longest proper suffix of each state that is a state as well."""
        self.ending: list[str | None] = [None]
        """The longest stop string that ends with each state."""
        self.held = [0]
        """Characters of each state's longest suffix that can still become a stop string."""
        for stop in stops:
            self._add(stop)
        self._connect()
        self.firsts = frozenset(self._next[0])
        """Characters that stop strings begin with."""

    def after(self, state: int, character: str) -> int:
        """The state that a character leads to."""
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
                self.ending.append(None)
                self.held.append(0)
            state = after
        self.ending[state] = stop

    def _connect(self) -> None:
        """Fill in what a state knows of its suffixes, shorter states before longer ones."""
        queue = deque((state, 1) for state in self._next[0].values())
        while queue:
            state, length = queue.popleft()
            shorter = self._shorter[state]
            self.ending[state] = self.ending[state] or self.ending[shorter]
            self.held[state] = length if self._next[state] else self.held[shorter]
            for character, after in self._next[state].items():
                self._shorter[after] = self.after(shorter, character)
                queue.append((after, length + 1))


@lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """A dataset's rows mostly ask for the same stop strings."""
    return _Automaton(stops)
