"""In which order the waiting are let in, where the admission policy may choose.

    of one priority    whose prefix is there already, the longest first     a prefix is used while it is there
                       whose prefix is being computed: not yet              it is not computed twice
    near the end       the longest first                                    the last one does not run alone

A lower priority never goes first. How often one may be passed is the slots' part (`engine.slots`).
"""

from __future__ import annotations

from engine.forecast import OutputLengths
from engine.reuse import Reuse
from engine.sequence import Sequence

WORTH_WAITING = 4
"""Blocks being computed by another that are waited for."""


class Order:
    """Looks at a window of the line, in order of (priority, arrival), and says who may enter, the best first."""

    def __init__(self, reuse: Reuse, lengths: OutputLengths) -> None:
        self._reuse = reuse
        self._cached = reuse.num_cached
        self._lengths = lengths

    def __call__(self, window: list[Sequence], near_end: bool) -> list[Sequence]:
        """Put a window in order; those that wait for a prefix are left out."""
        ready = self._ready(window)
        if near_end:
            return sorted(ready, key=lambda one: (one.priority, -self._expected(one), -self._cached(one)))
        return sorted(ready, key=lambda one: (one.priority, -self._cached(one)))

    def _ready(self, window: list[Sequence]) -> list[Sequence]:
        """Without those for whom a prefix is being computed; nobody of a lower priority enters meanwhile."""
        coming = [self._reuse.is_coming(sequence, WORTH_WAITING) for sequence in window]
        if True not in coming:
            return window
        lowest = window[coming.index(True)].priority
        return [
            sequence
            for sequence, later in zip(window, coming, strict=True)
            if sequence.priority <= lowest and not later
        ]

    def _expected(self, sequence: Sequence) -> int:
        """Tokens that may come of a sequence."""
        most = sequence.request.max_tokens[sequence.request.prompt_of(sequence.choice)]
        return self._lengths.longest(sequence.num_output_tokens, most) - sequence.num_output_tokens
