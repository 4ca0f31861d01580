"""What sequences take over of each other's KV: each one's path through the prefixes of its tokens.

    in line        nothing yet: a backlog of any length costs nothing
    near its head  the path is laid, and what it leads through is wanted: the pool keeps it longest
    running        what no block holds yet of it is being computed, and whoever else needs it can wait for that
    gone           the path is taken back; what its blocks hold is kept as long as there is room

A sequence that wants the logits of its prompt takes nothing over, so it has no path before it computes one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.blocks import BlockPool, IntegrityError
from engine.prefix_cache import Prefix
from engine.sequence import Sequence


class Reuse:
    """Owns the paths of sequences and the counts on them. Each path is laid once: O(1) a block of its tokens."""

    def __init__(self, blocks: BlockPool) -> None:
        self._blocks = blocks
        self._prefixes = blocks.prefixes

    def want(self, waiting: Iterable[Sequence]) -> None:
        """These are near the head of the line now; the last token's block is never taken over."""
        for sequence in waiting:
            if sequence.wanting:
                continue
            sequence.wanting = True
            if not sequence.wants_prompt_logits:
                whole = (sequence.num_tokens - 1) // self._blocks.block_size
                self._prefixes.extend(sequence.path, sequence.token_ids, whole)
                self._blocks.want(sequence.path)

    def cached(self, sequence: Sequence) -> list[int]:
        """The blocks that hold the beginning of a waiting sequence, as far as it is known."""
        blocks = []
        for prefix in sequence.path:
            if prefix.block is None:
                break
            blocks.append(prefix.block)
        return blocks

    def num_cached(self, sequence: Sequence) -> int:
        """How many blocks that are, found from where it was last time, so that many can be compared often.

        A hole in the middle, which a block computed twice can leave, is overlooked.
        """
        path, count = sequence.path, min(sequence.num_cached_blocks, len(sequence.path))
        while count and path[count - 1].block is None:
            count -= 1
        while count < len(path) and path[count].block is not None:
            count += 1
        sequence.num_cached_blocks = count
        return count

    def is_coming(self, sequence: Sequence, num_blocks: int) -> bool:
        """Whether so many blocks of a waiting sequence that are not there yet are being computed by a running one."""
        last = self.num_cached(sequence) + num_blocks - 1
        return last < len(sequence.path) and sequence.path[last].num_computing > 0

    def enter(self, sequence: Sequence, num_shared: int) -> None:
        """A sequence runs, with so many blocks taken over; the rest of its path it computes."""
        if sequence.wanting:
            self._blocks.unwant(sequence.path)
            sequence.wanting = False
        sequence.num_promised = len(sequence.path)
        for prefix in sequence.path[num_shared:]:
            prefix.num_computing += 1

    def computed(self, sequence: Sequence, before: int) -> None:
        """Note which prefixes the blocks hold that a running sequence has filled since it had `before` tokens."""
        size = self._blocks.block_size
        first, full = before // size, sequence.num_computed_tokens // size
        if first == full:
            return
        self._prefixes.extend(sequence.path, sequence.token_ids, full)
        for index in range(first, full):
            prefix = sequence.path[index]
            if index < sequence.num_promised:
                prefix.num_computing -= 1
            self._prefixes.hold(prefix, sequence.block_table[index])

    def withdraw(self, sequence: Sequence) -> None:
        """A running sequence computes no more, and waits again: call it before its blocks are given back."""
        for prefix in self._promised(sequence):
            prefix.num_computing -= 1
        sequence.num_promised = 0
        if sequence.wants_prompt_logits:  # it computes all of its prompt again
            self._prefixes.release(sequence.path)
        else:
            sequence.wanting = True
            self._blocks.want(sequence.path)

    def leave(self, sequence: Sequence) -> None:
        """A sequence is gone, whatever it was doing."""
        for prefix in self._promised(sequence):
            prefix.num_computing -= 1
        sequence.num_promised = 0
        if sequence.wanting:
            self._blocks.unwant(sequence.path)
            sequence.wanting = False
        self._prefixes.release(sequence.path)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Check that every count is that of the sequences there are.

        Raises:
            IntegrityError: it is not so.
        """
        paths: Counter[Prefix] = Counter()
        waiting: Counter[Prefix] = Counter()
        computing: Counter[Prefix] = Counter()
        for sequence in sequences:
            paths.update(sequence.path)
            waiting.update(sequence.path if sequence.wanting else ())
            computing.update(self._promised(sequence))
        for prefix in self._prefixes:
            counted = (prefix.num_paths, prefix.num_waiting, prefix.num_computing)
            found = (paths.pop(prefix, 0), waiting[prefix], computing[prefix])
            if counted != found or (prefix.block is None and not prefix.num_paths):
                raise IntegrityError(f"prefix {prefix.number} counts {counted} and sequences say {found}")
        if paths:
            raise IntegrityError(f"{len(paths)} prefixes that sequences lead through are not remembered")

    def _promised(self, sequence: Sequence) -> list[Prefix]:
        """What a running sequence is still to compute of what others may wait for."""
        computed = sequence.num_computed_tokens // self._blocks.block_size
        return sequence.path[computed : sequence.num_promised]
