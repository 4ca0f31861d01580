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
SHARES = 32
"""Into which the work is cut for each thread."""


class NumbaBackend:
    """Attention of a whole step in one call a layer."""

    name = "numba"
    kv_layout = KVLayout()

    def __init__(self) -> None:
        self._reference = ReferenceBackend()
        told = torch.get_num_threads()
        self._threads = min(told, numba.config.NUMBA_NUM_THREADS)
        numba.set_num_threads(self._threads)  # starts Numba's threads, if nothing has yet
        torch.set_num_threads(told)  # over OpenMP that has given torch one a core, whatever it was told

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
        self._shares: dict[tuple[int, int, int | None], npt.NDArray[np.int64]] = {}

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
        if key not in self._shares:
            self._shares[key] = self._partition(pieces, kv_heads, 2 * heads * dim)
        shares = self._shares[key]
        threads = 1 if len(shares) == 2 else self._threads
        numba.set_num_threads(threads)
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
            shares,
            threads,
            1 << 30 if call.sliding_window is None else call.sliding_window,
            np.float32(call.scaling),
        )
        numba.set_num_threads(self._threads)  # else the products that come next would have one thread, too
        return out

    def _partition(self, pieces: Pieces, kv_heads: int, cost: int) -> npt.NDArray[np.int64]:
        """Where each share's units start: equal work, not equal pieces. One share where little is to be done."""
        done = np.cumsum(np.repeat(pieces.work, kv_heads))
        alone = self._threads == 1 or done[-1] * (cost // kv_heads) < ALONE
        count = 1 if alone else self._threads * SHARES
        cuts = np.searchsorted(done, done[-1] * np.arange(1, count) / count, side="right")
        return np.concatenate([[0], cuts, [len(done)]]).astype(np.int64)
