"""How many tokens a step may compute, so that it takes no longer than asked.

A step's time grows with its tokens, by how much depends on the machine, the model and how long the sequences are, so
it is followed rather than computed: a step that took too long cuts the budget in proportion, one that used it up in
time lets it grow by a quarter.

    budget   512 | 230 | 230 | 287 | 250 | 250 ...        --max-step-ms 400
    took     890 | 380 | 310 | 460 | 395 | 250
"""

from __future__ import annotations

LEAST = 16
"""A prompt gets on by so many tokens a step at least, whatever the bound says."""
GROWTH = 1.25


class Pace:
    """The budget of tokens a step; without a bound on time it is the largest."""

    def __init__(self, most: int, max_step_ms: float | None) -> None:
        """
        Args:
            most: tokens, never more.
            max_step_ms: milliseconds a step should take at most, above 0.
        """
        self._most = most
        self._limit_s = None if max_step_ms is None else max_step_ms / 1000
        self.budget = most

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens has taken so long."""
        if self._limit_s is None:
            return
        if seconds > self._limit_s:
            self.budget = max(LEAST, int(num_tokens * self._limit_s / seconds))
        elif num_tokens >= self.budget:
            self.budget = min(self._most, int(self.budget * GROWTH) + 1)
