"""Decode steps recorded once and replayed: one launch in the place of some hundred.

A step of 5 rows, where steps of 1, 2, 4 and 8 were recorded:

    batch          r0 r1 r2 r3 r4            5 sequences, one token each
                    |  |  |  |  |            copied
    static buffers r0 r1 r2 r3 r4  .  .  .   8 rows; a padded one holds token 0 at position 0 and writes its KV to the
                    v  v  v  v  v            scratch block, which nobody owns
    graph of 8     l0 l1 l2 l3 l4  .  .  .   logits, of which the first 5 are handed on

A graph's kernels read lengths and block tables from the buffers. What they were told on the host is the same in each
replay, hence a graph a number of rows, one row a sequence, and the largest length there can be; with one split of the
keys no kernel chooses anything by the lengths it has at the time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine.attention.batch import PackedBatch
from engine.attention.varlen import PagedStep, VarlenBackend

log = logging.getLogger(__name__)

Compute = Callable[[PackedBatch], torch.Tensor]
"""Runs the model over a planned batch: logits `[rows, vocab_size]` in the model's dtype."""
Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a function that works on static buffers and returns one that does the same again."""


def bucket_sizes(most: int) -> list[int]:
    """Rows of the graphs up to `most` sequences: 1, 2, 4, 8, then in steps of 8 to 64, then of 16."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, most, 16)]
    return [*(size for size in sizes if size < most), most]


class DecodeGraphs:
    """The recorded decode steps of one model. Their memory is shared: only one runs at a time."""

    def __init__(
        self,
        compute: Compute,
        backend: VarlenBackend,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        scratch_block: int,
        vocab_size: int,
        device: torch.device,
        record: Record | None = None,
    ) -> None:
        """Record a step of each size, the largest first: the smaller ones then fit into its memory.

        Args:
            compute: runs the model.
            backend: its attention; replayable, so every layer reads lengths and tables from the device.
            scratch_block: a block that belongs to nobody.
            record: how; None: as CUDA graphs.

        Raises:
            RuntimeError: the model cannot be recorded, such as one that looks at a number on the host.
        """
        if not backend.replayable:
            raise RuntimeError(
                "a layer of this model is computed by the reference, which reads lengths on the host"
            )
        began = time.monotonic()
        self._compute = compute
        self._backend = backend
        self._scratch_block = scratch_block
        self._sizes = bucket_sizes(max_num_seqs)
        self._buffers = _Buffers(max_num_seqs, max_model_len, block_size, vocab_size, device)
        self._buffers.pad(0, max_num_seqs, scratch_block)
        record = record or CudaRecorder()
        self._replays = {size: record(self._step_of(size)) for size in reversed(self._sizes)}
        self.num_graphs = len(self._sizes)
        self.num_replays = 0
        self.num_padding_rows = 0
        self.seconds = time.monotonic() - began

    def replay(self, batch: PackedBatch) -> torch.Tensor | None:
        """Logits `[rows, vocab_size]` float32 of a step of decodes alone, none more than were recorded; else None."""
        rows = len(batch.spans)
        if batch.input_ids.shape[1] != rows or len(batch.logit_rows) != rows or rows > self._sizes[-1]:
            return None
        size = next(size for size in self._sizes if size >= rows)
        self._buffers.fill(batch, PagedStep.of(batch))
        self._buffers.pad(rows, size, self._scratch_block)
        self._replays[size]()
        self.num_replays += 1
        self.num_padding_rows += size - rows
        # The next replay writes the buffer again while what was drawn from this one may still be looked at.
        return self._buffers.logits[:rows].clone()

    def _step_of(self, size: int) -> Callable[[], None]:
        batch, step = self._buffers.first(size)
        logits = self._buffers.logits[:size]

        def run() -> None:
            self._backend.resume(batch, step)
            logits.copy_(self._compute(batch))

        return run


class _Buffers:
    """What a recorded step reads and writes, for the largest one; a smaller one uses the first rows."""

    def __init__(
        self, rows: int, max_model_len: int, block_size: int, vocab_size: int, device: torch.device
    ) -> None:
        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.input_ids, self.position_ids = numbers(rows), numbers(rows)
        self.slot_blocks, self.slot_offsets = numbers(rows), numbers(rows)
        self.lengths, self.key_starts = numbers(rows, dtype=torch.int32), numbers(rows + 1, dtype=torch.int32)
        self.tables = numbers(rows, -(-max_model_len // block_size), dtype=torch.int32)
        self.row_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.logit_rows = torch.arange(rows, device=device)
        self.logits = torch.zeros(rows, vocab_size, device=device)
        self._max_model_len = max_model_len

    def first(self, size: int) -> tuple[PackedBatch, PagedStep]:
        """The first `size` rows, as a model and its attention take them. There is nothing on the host to plan by."""
        batch = PackedBatch(
            input_ids=self.input_ids[:size][None],
            position_ids=self.position_ids[:size][None],
            logit_rows=self.logit_rows[:size],
            slot_blocks=self.slot_blocks[:size],
            slot_offsets=self.slot_offsets[:size],
            spans=[],
            block_tables=np.empty((0, 0), np.int32),
        )
        return batch, PagedStep(
            row_starts=self.row_starts[: size + 1],
            key_starts=self.key_starts[: size + 1],
            lengths=self.lengths[:size],
            tables=self.tables[:size],
            max_rows=1,
            max_length=self._max_model_len,
        )

    def fill(self, batch: PackedBatch, step: PagedStep) -> None:
        """Copy a step of decodes to the first rows, on the device."""
        rows, width = step.tables.shape
        self.input_ids[:rows] = batch.input_ids[0]
        self.position_ids[:rows] = batch.position_ids[0]
        self.slot_blocks[:rows] = batch.slot_blocks
        self.slot_offsets[:rows] = batch.slot_offsets
        self.lengths[:rows] = step.lengths
        self.tables[:rows, :width] = step.tables

    def pad(self, rows: int, size: int, scratch_block: int) -> None:
        """Fill rows `rows` to `size` up with sequences of one token in the scratch block; note where keys start."""
        if rows < size:
            for buffer in (self.input_ids, self.position_ids, self.slot_offsets):
                buffer[rows:size] = 0
            self.slot_blocks[rows:size] = scratch_block
            self.lengths[rows:size] = 1
            self.tables[rows:size, 0] = scratch_block
        torch.cumsum(self.lengths[:size], 0, dtype=torch.int32, out=self.key_starts[1 : size + 1])


class CudaRecorder:
    """Records a function as a CUDA graph; what it records shares one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run once beside the stream, so that what is made on first use is made unrecorded; then record."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay
