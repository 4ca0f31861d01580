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
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.interface import Chunk


class Span(NamedTuple):
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
    counts = np.array([len(chunk.token_ids) for chunk in chunks], np.int64)
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    num_logits = np.array([chunk.num_logits for chunk in chunks], np.int64)
    ends = counts.cumsum()
    tokens = np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64, ends[-1])
    positions = _runs(starts, counts)
    tables = _tables(chunks, (starts + counts - 1) // block_size + 1)
    slot_blocks = tables[np.repeat(np.arange(len(chunks)), counts), positions // block_size]
    spans = list(map(Span._make, np.stack([ends - counts, counts, starts], axis=1).tolist()))

    input_ids = to_device(tokens, device)
    unknown = [
        (end - 1, chunk.follows)
        for end, chunk in zip(ends.tolist(), chunks, strict=True)
        if chunk.follows is not None
    ]
    if drawn is not None and unknown:
        rows, entries = to_device(np.array(unknown, np.int64).T.copy(), device)
        input_ids.index_copy_(0, rows, drawn.index_select(0, entries))

    return PackedBatch(
        input_ids=input_ids[None],
        position_ids=to_device(positions, device)[None],
        logit_rows=to_device(_runs(ends - num_logits, num_logits), device),
        slot_blocks=to_device(slot_blocks.astype(np.int64), device),
        slot_offsets=to_device(positions % block_size, device),
        spans=spans,
        block_tables=tables,
    )


def to_device(array: npt.NDArray[np.int32] | npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """The array on the device, without a wait: a GPU copies by itself only what lies in pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _runs(firsts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Runs of numbers, one after the other: firsts [7, 0] and counts [1, 3] are [7, 0, 1, 2]."""
    ends = counts.cumsum()
    return np.arange(ends[-1]) + np.repeat(firsts - (ends - counts), counts)


def _tables(chunks: Sequence[Chunk], widths: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Block tables, padded. One may run ahead of the tokens; only the blocks that hold some are copied."""
    tables = np.zeros((len(chunks), widths.max()), np.int32)
    held = (chunk.block_table[:width] for chunk, width in zip(chunks, widths.tolist(), strict=True))
    tables[np.arange(tables.shape[1]) < widths[:, None]] = np.fromiter(chain.from_iterable(held), np.int32)
    return tables
