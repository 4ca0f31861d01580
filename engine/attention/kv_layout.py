"""How a backend wants the KV blocks to lie in memory. Whoever else reads them sees one shape.

shape, for all           [blocks, N, block_size, D]
in memory, head-major    [blocks, N, block_size, D]      a head's block in one piece
in memory, token-major   [blocks, block_size, N, D]      the same, transposed: FlashAttention's pages
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.limits import BLOCK_SIZE

GPU_BLOCK_SIZE = 16
"""Tokens of a block on a GPU where nobody says: tables half as long as with 8. Which is faster is not measured."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a backend asks of the store."""

    token_major: bool = False
    block_multiple: int = 1
    """A block's tokens must be a multiple of it."""
    fewest_tokens: int = BLOCK_SIZE
    """Those of a block below which it reads slower."""

    @property
    def usual_block_size(self) -> int:
        """Tokens of a block where nobody says."""
        return -(-self.fewest_tokens // self.block_multiple) * self.block_multiple
