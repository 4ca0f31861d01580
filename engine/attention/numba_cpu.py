"""The CPU backend: decode by the Numba kernel, prefill by torch's fused one, rare features by the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import LayerCall
from engine.attention.batch import PackedBatch
from engine.attention.fused_prefill import attend_chunk
from engine.attention.kv_layout import KVLayout
from engine.attention.numba_kernel import decode_kernel
from engine.attention.numba_numbers import bits, scales
from engine.attention.reference import ReferenceBackend, write_kv

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The sequences of a step that compute one token each."""

    rows: Ints
    tables: Ints
    lengths: Ints

    @classmethod
    def of(cls, batch: PackedBatch) -> _Decodes:
        chosen = [index for index, span in enumerate(batch.spans) if span.num_rows == 1]
        return cls(
            np.array([batch.spans[index].first_row for index in chosen], np.int32),
            batch.block_tables if len(chosen) == len(batch.spans) else batch.block_tables[chosen],
            np.array([batch.spans[index].length for index in chosen], np.int32),
        )


class NumbaBackend:
    """Decodes 30 layers of 128 sequences of 173 tokens in 17 ms where SDPA takes 85 to 385 (two Zen 5 cores)."""

    name = "numba"
    kv_layout = KVLayout()

    def __init__(self) -> None:
        self._reference = ReferenceBackend()
        self._threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)

    def kv_dtypes(self, compute: torch.dtype) -> Sequence[torch.dtype]:
        """See `Backend.kv_dtypes`: all there are."""
        return self._reference.kv_dtypes(compute)

    def plan(self, batch: PackedBatch) -> None:
        """Tell decodes from prefill chunks, once for all layers."""
        self._reference.plan(batch)
        self._decodes = _Decodes.of(batch)
        self._chunks = [
            (span, table)
            for span, table in zip(batch.spans, self._reference.tables, strict=True)
            if span.num_rows > 1
        ]
        rows = [np.arange(span.first_row, span.end_row) for span, _ in self._chunks]
        self._chunk_rows = torch.from_numpy(np.concatenate(rows)) if rows else None
        if self._chunk_rows is not None:
            self._chunk_blocks = batch.slot_blocks[self._chunk_rows]
            self._chunk_offsets = batch.slot_offsets[self._chunk_rows]
        self._parts: dict[tuple[int, int | None], tuple[Ints, Ints]] = {}
        numba.set_num_threads(self._threads)

    def attend(self, call: LayerCall) -> torch.Tensor:
        """See `Backend.attend`."""
        if call.softcap is not None or call.sinks is not None or call.key.shape != call.value.shape:
            return self._reference.attend(call)
        out = torch.empty_like(call.query)
        if self._chunk_rows is not None:
            write_kv(call, self._chunk_rows, self._chunk_blocks, self._chunk_offsets)
            for span, table in self._chunks:
                out[span.first_row : span.end_row] = attend_chunk(call, span, table)
        if len(self._decodes.rows):
            self._decode(call, out)
        return out

    def _decode(self, call: LayerCall, out: torch.Tensor) -> None:
        heads, kv_heads, head_dim = call.query.shape[1], call.key.shape[1], call.query.shape[2]
        key = (kv_heads, call.sliding_window)
        if key not in self._parts:
            self._parts[key] = self._partition(kv_heads, call.sliding_window)
        first_seen, part_starts = self._parts[key]
        decode_kernel(heads // kv_heads, head_dim)(
            bits(call.query),
            bits(call.key),
            bits(call.value),
            bits(call.key_blocks),
            bits(call.value_blocks),
            scales(call.key_blocks),
            scales(call.value_blocks),
            bits(out),
            self._decodes.rows,
            self._decodes.tables,
            self._decodes.lengths,
            first_seen,
            part_starts,
            np.float32(call.scaling),
        )

    def _partition(self, kv_heads: int, window: int | None) -> tuple[Ints, Ints]:
        """First visible token a sequence, and where each thread's units start: equal context, not equal requests."""
        lengths = self._decodes.lengths
        first_seen = (
            np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0).astype(np.int32)
        )
        done = np.cumsum(np.repeat(lengths - first_seen, kv_heads))
        shares = done[-1] * np.arange(1, self._threads) / self._threads
        cuts = np.searchsorted(done, shares, side="right")
        return first_seen, np.concatenate([[0], cuts, [len(done)]]).astype(np.int32)
