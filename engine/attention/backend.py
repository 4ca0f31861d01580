"""What an attention backend is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.batch import PackedBatch
from engine.attention.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One attention layer of one step: `T` rows, `H` query heads, `N` key-value heads, head sizes `D` and
    `E`.
    """

    query: torch.Tensor
    """`[T, H, D]`, contiguous."""
    key: torch.Tensor
    """`[T, N, D]`, contiguous: this step's keys, not yet in the store."""
    value: torch.Tensor
    """`[T, N, E]`, contiguous."""
    key_blocks: torch.Tensor
    """`[blocks, N, block_size, stored_dim(D)]`: this layer's part of the KV store, written to. Its dtype may be
    another than the keys' (`engine/attention/kv_dtype.py`).
    """
    value_blocks: torch.Tensor
    """`[blocks, N, block_size, stored_dim(E)]`."""
    scaling: float
    sliding_window: int | None
    """A query at position p sees positions p - window + 1 .. p. None: all before it."""
    softcap: float | None
    """Scores become `softcap * tanh(score / softcap)` (Gemma 2)."""
    sinks: torch.Tensor | None
    """`[H]`: one more logit a head that takes probability and gives nothing (gpt-oss)."""


class Backend(Protocol):
    """Writes a layer's new keys and values to their blocks, then attends over the blocks, exact lengths."""

    @property
    def name(self) -> str:
        """For logs and reports."""
        ...

    @property
    def kv_layout(self) -> KVLayout:
        """How it wants the KV blocks to lie in memory."""
        ...

    def kv_dtypes(self, compute: torch.dtype) -> Sequence[torch.dtype]:
        """Dtypes in which keys and values can be kept for a model that computes in `compute`."""
        ...

    def plan(self, batch: PackedBatch) -> None:
        """Called once a step, before its layers: whatever is the same for all of them is worked out here."""
        ...

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Returns `[T, H, E]` in the query's dtype."""
        ...
