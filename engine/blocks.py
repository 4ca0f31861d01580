"""The KV store's blocks, by number. The tensors behind them belong to the runner.

free   no owner, nothing worth keeping
idle   no owner; its KV is in the prefix cache until the room is needed
used   one owner, or several that share a prefix

       allocate               free
free ------------> used ---------------> idle, if the prefix cache knows it, else free
idle ------------> used                  (of one table the tail first: a prefix outlives what follows it)
  '--- share ------^

Idle blocks are given up in this order, from the left, each in O(1):

    not wanted                          wanted by sequences near the head of the line
    used long ago ... used just now     by the last of them ... by the first of them
                                        (of each the tail first)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

from engine.prefix_cache import Prefix, PrefixCache


class IntegrityError(RuntimeError):
    """The books of blocks or slots do not balance: a bug of the engine, never of a request."""


class BlockPool:
    """Who owns which block. A block is `block_size` tokens of KV, in every layer. Everything is O(1) a block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefixes = PrefixCache(block_size)
        self.num_evictions = 0
        """Idle blocks whose KV was given up for room."""
        self._owners = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._unwanted: OrderedDict[int, None] = OrderedDict()
        """Idle blocks that nobody waits for; given up from the front."""
        self._wanted: OrderedDict[int, None] = OrderedDict()
        """Idle blocks that a waiting sequence will need; given up from the back, after all others."""

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, free and idle."""
        return len(self._free) + len(self._unwanted) + len(self._wanted)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def capacity(self) -> int:
        """Tokens the whole pool holds."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def num_owners(self, block: int) -> int:
        """In how many block tables a block stands."""
        return self._owners[block]

    def allocate(self, count: int) -> list[int]:
        """Take blocks to write to.

        Raises:
            IntegrityError: fewer are free; the caller looks at `num_free` first.
        """
        if count > self.num_free:
            raise IntegrityError(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} are free")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Become one more owner of blocks that are used or idle; they are not written to from now on."""
        for block in blocks:
            if not self._owners[block]:
                del self._idle(self.prefixes.held_by(block))[block]
            self._owners[block] += 1

    def free(self, block_table: Sequence[int]) -> None:
        """Give up a table's blocks.

        Raises:
            IntegrityError: one of them has no owner.
        """
        for block in reversed(block_table):
            if not self._owners[block]:
                raise IntegrityError(f"block {block} returned twice")
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block not in self.prefixes:
                self._free.append(block)
                continue
            idle = self._idle(self.prefixes.held_by(block))
            idle[block] = None
            if idle is self._wanted:
                idle.move_to_end(block, last=False)

    def want(self, path: Iterable[Prefix]) -> None:
        """A sequence near the head of the line has this path: what is idle of it outlives what nobody waits for."""
        for prefix in path:
            prefix.num_waiting += 1
            block = prefix.block
            if block is not None and prefix.num_waiting == 1 and not self._owners[block]:
                del self._unwanted[block]
                self._wanted[block] = None

    def unwant(self, path: Sequence[Prefix]) -> None:
        """That sequence waits no more."""
        for prefix in reversed(path):
            prefix.num_waiting -= 1
            block = prefix.block
            if block is not None and not prefix.num_waiting and not self._owners[block]:
                del self._wanted[block]
                self._unwanted[block] = None

    def forget_idle(self) -> None:
        """Nobody knows what the idle blocks hold: they are free."""
        for idle in (self._unwanted, self._wanted):
            for block in idle:
                self.prefixes.forget(block)
                self._free.append(block)
            idle.clear()

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """Check that every block is free, idle, or in as many block tables as it has owners.

        Raises:
            IntegrityError: it is not so.
        """
        tables = list(block_tables)
        if any(len(set(table)) != len(table) for table in tables):
            raise IntegrityError("a block is twice in one table")
        owners = [0] * self.num_blocks
        for block in chain.from_iterable(tables):
            owners[block] += 1
        if owners != self._owners:
            wrong = [block for block in range(self.num_blocks) if owners[block] != self._owners[block]]
            raise IntegrityError(f"blocks {wrong[:10]} have not as many owners as are in the books")
        unowned = sorted([*self._free, *self._unwanted, *self._wanted])
        if unowned != [block for block, count in enumerate(owners) if not count]:
            raise IntegrityError("a block is lost, or free and owned at once")
        if any(block in self.prefixes for block in self._free) or any(
            block not in self.prefixes or self._idle(self.prefixes.held_by(block)) is not idle
            for idle in (self._unwanted, self._wanted)
            for block in idle
        ):
            raise IntegrityError("the prefix cache and the idle blocks differ")

    def _idle(self, prefix: Prefix) -> OrderedDict[int, None]:
        """Where a block that holds it stands while it is idle."""
        return self._wanted if prefix.num_waiting else self._unwanted

    def _evict(self) -> int:
        block, _ = self._unwanted.popitem(last=False) if self._unwanted else self._wanted.popitem()
        self.prefixes.forget(block)
        self.num_evictions += 1
        return block
