"""The KV store's blocks, by number. The tensors behind them belong to the runner."""

from __future__ import annotations

from collections.abc import Iterable


class IntegrityError(RuntimeError):
    """The books of blocks or slots do not balance: a bug of the engine, never of a request."""


class BlockPool:
    """Which blocks are free. A block is `block_size` tokens of KV, in every layer; it has one owner at most.

    Allocation and return are O(1) a block. The last block returned is handed out first: it is the likeliest to
    be in a cache.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens the whole pool holds."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take blocks out of the pool.

        Raises:
            IntegrityError: fewer are free; the caller looks at `num_free` first.
        """
        if count > len(self._free):
            raise IntegrityError(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._used[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            IntegrityError: one of them is free already.
        """
        for block in blocks:
            if not self._used[block]:
                raise IntegrityError(f"block {block} returned twice")
            self._used[block] = 0
            self._free.append(block)

    def check_integrity(self, owners: Iterable[list[int]]) -> None:
        """Check that every block is either free or in exactly one of the owners' block tables.

        Raises:
            IntegrityError: it is not so.
        """
        owned = [block for table in owners for block in table]
        if len(set(owned)) != len(owned):
            raise IntegrityError("a block is owned twice")
        if len(owned) + len(self._free) != self.num_blocks or not set(owned).isdisjoint(self._free):
            raise IntegrityError(
                f"{len(owned)} blocks owned, {len(self._free)} free, {self.num_blocks} in all"
            )
        if len(set(self._free)) != len(self._free):
            raise IntegrityError("a block is free twice")
