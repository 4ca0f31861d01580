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
from itertools import accumulate

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

    def remaining(self, num_tokens: int, most: int) -> int:
        """Tokens to hold free for an output of so many: at least one, and never beyond `most` in all."""
        if not self._sums:
            self._sums = list(accumulate(reversed(self._sorted)))[::-1]
        first = bisect_right(self._sorted, num_tokens)
        longer = len(self._sorted) - first
        more = self._sums[first] / longer - num_tokens if longer else UNKNOWN
        return max(1, min(round(TRUST * more), most - num_tokens))


class Forecast:
    """Says whether one more sequence will fit beside those that run."""

    def __init__(self, blocks: BlockPool) -> None:
        self.lengths = OutputLengths()
        self._blocks = blocks

    def fits(self, running: Iterable[Sequence], newcomer: Sequence, need: int) -> bool:
        """Whether the pool will hold all of them at every moment to come.

        Args:
            running: those that hold blocks.
            newcomer: the one that asks.
            need: blocks it takes on admission.
        """
        size, used = self._blocks.block_size, self._blocks.num_used + need
        growing = [(self._remaining(sequence), sequence) for sequence in [*running, newcomer]]
        room = self._blocks.num_blocks - used
        if sum(remaining // size + 1 for remaining, _ in growing) <= room:
            return True  # even if none gave anything back: the common case, without a look at their blocks
        growing.sort(key=lambda one: one[0])
        given_back = 0
        for ended, (steps, sequence) in enumerate(growing):
            if (len(growing) - ended) * (steps / size + 0.5) - given_back > room:
                return False
            given_back += need if sequence is newcomer else self._own(sequence)
        return True

    def _remaining(self, sequence: Sequence) -> int:
        request = sequence.request
        most = request.max_tokens[request.prompt_of(sequence.choice)]
        return self.lengths.remaining(sequence.num_output_tokens, most)

    def _own(self, sequence: Sequence) -> int:
        """Blocks that nobody else holds: what its end gives back."""
        return sum(self._blocks.num_owners(block) == 1 for block in sequence.block_table)
