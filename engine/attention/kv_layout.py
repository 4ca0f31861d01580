"""How a backend wants the KV blocks to lie in memory. Whoever else reads them sees one shape.

shape, for all           [blocks, N, block_size, D]
in memory, head-major    [blocks, N, block_size, D]      a head's block in one piece
in memory, token-major   [blocks, block_size, N, D]      the same, transposed: FlashAttention's pages
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.limits import BLOCK_SIZE
from protocol import ModelUnavailable


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a backend asks of the store."""

    token_major: bool = False
    block_multiple: int = 1
    """A block's tokens must be a multiple of it."""

    def block_size(self, given: int | None, backend: str) -> int:
        """The block size that was asked for, or the smallest that suits.

        Raises:
            ModelUnavailable: it was asked for and the backend cannot read it.
        """
        size = BLOCK_SIZE if given is None else given
        nearest = -(-size // self.block_multiple) * self.block_multiple
        if given is not None and given != nearest:
            raise ModelUnavailable(
                f"--block-size is {given}, and attention backend {backend} reads blocks of a multiple of "
                f"{self.block_multiple} tokens: give {nearest}, or leave it out"
            )
        return nearest
