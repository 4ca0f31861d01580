"""How long outputs will be, and whether the pool will hold them: what keeps preemption rare.

A pool that is full today is emptied by those that end and filled by those that go on. What counts is the fullest
moment to come, which is when one of them ends:

    blocks
      ^        .-'|                    a, b and c grow by a token a step; a ends first and gives back what it holds
      |     .-'   |  .-'|
      |  .-'      '-'   |  .-'|        the fullest moment of the three is at the end of a
      '-----------a-----b-----c--> steps

Lengths are those of the outputs that have ended: of the ones that were longer than a sequence is now, the mean. (The
idea is LightLLM's past-future scheduler: R. Gong and others, "Past-Future Scheduler for LLM Serving under SLA
Guarantees", ASPLOS 2025.)
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate
from operator import itemgetter

from engine.blocks import BlockPool
from engine.sequence import Sequence

WINDOW = 512
"""Outputs remembered."""
UNKNOWN = 64
"""Tokens thought to come while no output, or none as long, has ended."""
TRUST = 0.5
"""Part of what is thought to come that is held free. Ends are spread, and an idle block is dearer than a rare
preemption: with all of it first-fit took 13 % more steps at 15 % of the blocks, with half of it 3 %, and half as many
tokens were computed twice as without a forecast (bench.pressure)."""


class OutputLengths:
    """The lengths of the last outputs that have ended."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] = []
        """Of the sorted lengths from each place on; made when asked for."""

    def observe(self, num_tokens: int) -> None:
        """Note an output that has ended."""
        if len(self._recent) == WINDOW:
            self._sorted.remove(self._recent.popleft())
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)
        self._sums = []

    def longest(self, num_tokens: int, most: int) -> int:
        """The length that an output of so many tokens may come to: that of the longest of late, at most `most`."""
        longest = self._sorted[-1] if self._sorted else most
        return min(most, max(longest, num_tokens + 1))

    def remaining(self, num_tokens: int, most: int) -> int:
        """Tokens to hold free for an output of so many: at least one, and never beyond `most` in all."""
        if not self._sums:
            self._sums = list(accumulate(reversed(self._sorted)))[::-1]
        first = bisect_right(self._sorted, num_tokens)
        longer = len(self._sorted) - first
        more = self._sums[first] / longer - num_tokens if longer else UNKNOWN
        return max(1, min(round(TRUST * more), most - num_tokens))


class Ahead:
    """What is thought to come of those that run: looked at once for all that ask to be let in beside them."""

    def __init__(self, running: Iterable[Sequence], lengths: OutputLengths, blocks: BlockPool) -> None:
        self._running = running
        self._lengths = lengths
        self._blocks = blocks

    @cached_property
    def growth(self) -> int:
        """Blocks that all of them come to take if none gives anything back."""
        size = self._blocks.block_size
        return sum(self.remaining(sequence) // size + 1 for sequence in self._running)

    @cached_property
    def ends(self) -> list[tuple[int, int]]:
        """Of each, the soonest first: steps until it ends, and blocks that it gives back then."""
        ends = [(self.remaining(sequence), self._own(sequence)) for sequence in self._running]
        return sorted(ends, key=itemgetter(0))

    def remaining(self, sequence: Sequence) -> int:
        """Tokens thought to come of one."""
        most = sequence.request.max_tokens[sequence.request.prompt_of(sequence.choice)]
        return self._lengths.remaining(sequence.num_output_tokens, most)

    def _own(self, sequence: Sequence) -> int:
        """Blocks that nobody else holds: what its end gives back."""
        return sum(self._blocks.num_owners(block) == 1 for block in sequence.block_table)


class Forecast:
    """Says whether one more sequence will fit beside those that run."""

    def __init__(self, blocks: BlockPool) -> None:
        self.lengths = OutputLengths()
        self._blocks = blocks

    def ahead(self, running: Iterable[Sequence]) -> Ahead:
        """What is thought to come of those that hold blocks; good until one of them changes."""
        return Ahead(running, self.lengths, self._blocks)

    def fits(self, ahead: Ahead, newcomer: Sequence, need: int) -> bool:
        """Whether the pool will hold all of them at every moment to come.

        Args:
            ahead: of those that run.
            newcomer: the one that asks.
            need: blocks it takes on admission.
        """
        size, room = self._blocks.block_size, self._blocks.num_free - need
        more = ahead.remaining(newcomer)
        if ahead.growth + more // size + 1 <= room:
            return True  # even if none gave anything back: the common case, without a look at their blocks
        ends = list(ahead.ends)
        insort(ends, (more, need), key=itemgetter(0))
        given_back = 0
        for ended, (steps, blocks) in enumerate(ends):
            if (len(ends) - ended) * (steps / size + 0.5) - given_back > room:
                return False
            given_back += blocks
        return True
