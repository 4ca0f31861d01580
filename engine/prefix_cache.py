"""Which full blocks hold the KV of which tokens.

A block's KV depends on every token before it, so a block is known by its own tokens and by the content of the block
before it. Contents are numbered as they come:

    tokens        [a b c d] [e f g h] [i j k l]          block_size 4
    content    0 ------> 1 -------> 2 -------> 3         entry (1, (e f g h)) -> block 7, content 2

The tokens themselves are the key, compared one by one: two prefixes that are not equal never share KV, whatever
their hashes. One engine has one model, so the model is no part of it.
"""

from __future__ import annotations

from typing import NamedTuple

ROOT = 0
"""The content before the first block."""

_Key = tuple[int, tuple[int, ...]]


class Entry(NamedTuple):
    """A block whose KV is known."""

    block: int
    content: int


class PrefixCache:
    """From (content before, tokens) to block. Whether a block may be handed out again is the pool's business."""

    def __init__(self) -> None:
        self._entries: dict[_Key, Entry] = {}
        self._keys: dict[int, _Key] = {}
        self._contents = ROOT

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, before: int, token_ids: tuple[int, ...]) -> Entry | None:
        """The block that holds these tokens after that content."""
        return self._entries.get((before, token_ids))

    def add(self, before: int, token_ids: tuple[int, ...], block: int) -> int:
        """Note what a block holds, unless another block holds the same; returns the number of the content."""
        key = (before, token_ids)
        known = self._entries.get(key)
        if known is not None:
            return known.content
        self._contents += 1
        self._entries[key] = Entry(block, self._contents)
        self._keys[block] = key
        return self._contents

    def forget(self, block: int) -> None:
        """The block is about to be written anew. What followed it is not found any more, and goes in its turn."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._entries[key]
