"""Which full blocks hold the KV of which tokens, and who will need them.

A block's KV depends on every token before it, so it is known by its own tokens and by the prefix before it. Prefixes
are numbered as they come:

    tokens        [a b c d] [e f g h] [i j k l]          block_size 4
    prefix     0 ------> 1 -------> 2 -------> 3         key (1, (e f g h)) -> prefix 2, held by block 7

The tokens themselves are the key, compared one by one: two prefixes that are not equal never share KV, whatever
their hashes. One engine has one model, so the model is no part of it.

A prefix is remembered while a block holds it or a sequence's path leads through it, so the counts of who waits for it
and who computes it live and end with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

ROOT = 0
"""The prefix of no tokens."""

_Key = tuple[int, tuple[int, ...]]


class Prefix:
    """The first so many whole blocks of tokens of some sequence."""

    __slots__ = ("block", "key", "num_computing", "num_paths", "num_waiting", "number")

    def __init__(self, number: int, key: _Key) -> None:
        self.number = number
        self.key = key
        self.block: int | None = None
        """The block that holds the KV of its last tokens; those before it may lie in no block any more."""
        self.num_paths = 0
        """Sequences that lead through it."""
        self.num_waiting = 0
        """Those of them that wait near the head of the line."""
        self.num_computing = 0
        """Those of them that run and have not come so far yet."""


class PrefixCache:
    """From (prefix before, tokens) to prefix, and from block to prefix. Who may write to a block the pool says."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prefixes: dict[_Key, Prefix] = {}
        self._held: dict[int, Prefix] = {}
        self._numbers = ROOT

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def __len__(self) -> int:
        """Prefixes that blocks hold."""
        return len(self._held)

    def __iter__(self) -> Iterator[Prefix]:
        """Every prefix that is remembered."""
        return iter(self._prefixes.values())

    def held_by(self, block: int) -> Prefix:
        """What a block holds.

        Raises:
            KeyError: nothing that is known.
        """
        return self._held[block]

    def extend(self, path: list[Prefix], token_ids: Sequence[int], num_blocks: int) -> None:
        """Lead a path on through the prefixes of a sequence's tokens, up to so many blocks."""
        before = path[-1].number if path else ROOT
        for start in range(len(path) * self._block_size, num_blocks * self._block_size, self._block_size):
            key = (before, tuple(token_ids[start : start + self._block_size]))
            prefix = self._prefixes.get(key)
            if prefix is None:
                self._numbers += 1
                prefix = self._prefixes[key] = Prefix(self._numbers, key)
            prefix.num_paths += 1
            path.append(prefix)
            before = prefix.number

    def release(self, path: list[Prefix]) -> None:
        """Take a path back, which is empty then."""
        for prefix in path:
            prefix.num_paths -= 1
            self._forget_if_unused(prefix)
        path.clear()

    def hold(self, prefix: Prefix, block: int) -> None:
        """Note that a block holds a prefix, unless another does."""
        if prefix.block is None:
            prefix.block = block
            self._held[block] = prefix

    def forget(self, block: int) -> None:
        """The block is about to be written anew. What followed it is not found any more, and goes in its turn."""
        prefix = self._held.pop(block)
        prefix.block = None
        self._forget_if_unused(prefix)

    def _forget_if_unused(self, prefix: Prefix) -> None:
        if prefix.block is None and not prefix.num_paths:
            del self._prefixes[prefix.key]
