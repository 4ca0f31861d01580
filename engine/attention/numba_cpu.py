"""The CPU backend: all by the Numba kernel, rare features by the reference."""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import LayerCall
from engine.attention.batch import PackedBatch
from engine.attention.kv_layout import KVLayout
from engine.attention.numba_kernel import attend
from engine.attention.numba_numbers import bits, scales
from engine.attention.pieces import Pieces, cut, rows_of_many_tiles
from engine.attention.reference import ReferenceBackend, write_kv

ALONE = 1_500_000
"""Multiplications that one thread does in the time it takes to wake another and wait for it (some 100 us)."""


class NumbaBackend:
    """Attention of a whole step in one call a layer."""

    name = "numba"
    kv_layout = KVLayout()

    def __init__(self) -> None:
        self._reference = ReferenceBackend()
        self._threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)

    def kv_dtypes(self, compute: torch.dtype) -> Sequence[torch.dtype]:
        """See `Backend.kv_dtypes`: all there are."""
        return self._reference.kv_dtypes(compute)

    def plan(self, batch: PackedBatch) -> None:
        """See `Backend.plan`; what depends on a layer's window and heads is worked out with the first such layer."""
        self._reference.plan(batch)
        self._batch = batch
        rows = rows_of_many_tiles(batch)
        self._early = None if rows is None else torch.from_numpy(rows)
        self._pieces: dict[tuple[int, int | None], Pieces] = {}
        self._parts: dict[tuple[int, int, int | None], npt.NDArray[np.int64]] = {}

    def attend(self, call: LayerCall) -> torch.Tensor:
        """See `Backend.attend`."""
        heads, kv_heads, dim = call.query.shape[1], call.key.shape[1], call.query.shape[2]
        if call.softcap is not None or call.sinks is not None or call.value.shape[2] != dim or dim % 8:
            return self._reference.attend(call)
        if self._early is not None:
            places = (self._batch.slot_blocks[self._early], self._batch.slot_offsets[self._early])
            write_kv(call, self._early, *places)
        out = torch.empty_like(call.query)
        cut_by = (call.key_blocks.shape[2], call.sliding_window)
        if cut_by not in self._pieces:
            self._pieces[cut_by] = cut(self._batch, *cut_by)
        pieces = self._pieces[cut_by]
        key = (kv_heads, heads * dim, call.sliding_window)
        if key not in self._parts:
            self._parts[key] = self._partition(pieces, kv_heads, 2 * heads * dim)
        numba.set_num_threads(len(self._parts[key]) - 1)
        attend(
            bits(call.query),
            bits(call.key),
            bits(call.value),
            bits(call.key_blocks),
            bits(call.value_blocks),
            scales(call.key_blocks),
            scales(call.value_blocks),
            bits(out),
            self._batch.block_tables,
            pieces.pieces,
            pieces.joins,
            np.empty(pieces.slots * heads * (dim + 2), np.float32),
            self._parts[key],
            1 << 30 if call.sliding_window is None else call.sliding_window,
            np.float32(call.scaling),
        )
        return out

    def _partition(self, pieces: Pieces, kv_heads: int, cost: int) -> npt.NDArray[np.int64]:
        """Where each thread's units start: equal work, not equal pieces. One thread where little is to be done."""
        done = np.cumsum(np.repeat(pieces.work, kv_heads))
        threads = 1 if done[-1] * (cost // kv_heads) < ALONE else self._threads
        cuts = np.searchsorted(done, done[-1] * np.arange(1, threads) / threads, side="right")
        return np.concatenate([[0], cuts, [len(done)]]).astype(np.int64)
