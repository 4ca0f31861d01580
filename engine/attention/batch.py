"""One step's tokens, packed into one row.

chunks        A: 1 token at 7     B: 4 tokens at 0    C: 1 token at 2
input_ids     [ a7  b0 b1 b2 b3  c2 ]                       [1, T]
position_ids  [  7   0  1  2  3   2 ]                       [1, T]
spans         A rows 0:1, length 8; B rows 1:5, length 4; C rows 5:6, length 3
block_tables  one line a span, padded with 0                [S, W]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.interface import Chunk


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one chunk, and where they stand in their sequence."""

    first_row: int
    num_rows: int
    start: int
    """Position of the first row: tokens the KV held before this step."""

    @property
    def end_row(self) -> int:
        """One past the last row."""
        return self.first_row + self.num_rows

    @property
    def length(self) -> int:
        """Tokens of the sequence once this step has written its own."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Everything a forward pass needs to know of one step. `T` tokens, `S` chunks, `W` the longest block
    table.
    """

    input_ids: torch.Tensor
    """`[1, T]` int64."""
    position_ids: torch.Tensor
    """`[1, T]` int64."""
    logit_rows: torch.Tensor
    """`[sum of the chunks' num_logits]` int64: the last rows of each."""
    slot_blocks: torch.Tensor
    """`[T]` int64: the block each token's KV goes to ..."""
    slot_offsets: torch.Tensor
    """`[T]` int64: ... and its place in that block."""
    spans: list[Span]
    block_tables: npt.NDArray[np.int32]
    """`[S, W]`, on the host."""


def pack(
    chunks: Sequence[Chunk], block_size: int, device: torch.device, drawn: torch.Tensor | None = None
) -> PackedBatch:
    """Pack the chunks of one step; all arrays are made in numpy and moved to `device` once each, without a wait.

    Args:
        chunks: at least one.
        block_size: tokens of a block.
        device: where the batch is computed.
        drawn: int64 `[rows]` on `device`; tokens that are not known on the host are taken from it there.
    """
    spans: list[Span] = []
    row = 0
    for chunk in chunks:
        spans.append(Span(row, len(chunk.token_ids), chunk.start))
        row += len(chunk.token_ids)

    tokens = np.empty(row, np.int64)
    positions = np.empty(row, np.int64)
    slot_blocks = np.empty(row, np.int64)
    # A table may run ahead of the tokens; only the blocks that hold some are copied.
    widths = [(span.length - 1) // block_size + 1 for span in spans]
    tables = np.zeros((len(chunks), max(widths)), np.int32)
    for table, width, span, chunk in zip(tables, widths, spans, chunks, strict=True):
        table[:width] = chunk.block_table[:width]
        if span.num_rows == 1:  # decode, the common case: no temporary arrays
            tokens[span.first_row] = chunk.token_ids[0]
            positions[span.first_row] = span.start
            slot_blocks[span.first_row] = table[span.start // block_size]
            continue
        rows = slice(span.first_row, span.end_row)
        tokens[rows] = chunk.token_ids
        positions[rows] = np.arange(span.start, span.length)
        slot_blocks[rows] = table[positions[rows] // block_size]

    logit_rows = [
        row
        for span, chunk in zip(spans, chunks, strict=True)
        for row in range(span.end_row - chunk.num_logits, span.end_row)
    ]

    input_ids = to_device(tokens, device)
    unknown = [
        (span.end_row - 1, chunk.follows)
        for span, chunk in zip(spans, chunks, strict=True)
        if chunk.follows is not None
    ]
    if drawn is not None and unknown:
        rows, entries = to_device(np.array(unknown, np.int64).T.copy(), device)
        input_ids.index_copy_(0, rows, drawn.index_select(0, entries))

    return PackedBatch(
        input_ids=input_ids[None],
        position_ids=to_device(positions, device)[None],
        logit_rows=to_device(np.array(logit_rows, np.int64), device),
        slot_blocks=to_device(slot_blocks, device),
        slot_offsets=to_device(positions % block_size, device),
        spans=spans,
        block_tables=tables,
    )


def to_device(array: npt.NDArray[np.int32] | npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """The array on the device, without a wait: a GPU copies by itself only what lies in pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
