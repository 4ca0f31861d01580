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
from itertools import accumulate, chain
from operator import add, sub
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
    # Lists a chunk, arrays a token: on a few chunks a numpy call costs more than its work.
    counts = [len(chunk.token_ids) for chunk in chunks]
    starts = [chunk.start for chunk in chunks]
    ends = list(accumulate(counts))
    lengths = list(map(add, starts, counts))
    spans = list(map(Span, map(sub, ends, counts), counts, starts))
    tokens = np.fromiter(chain.from_iterable([chunk.token_ids for chunk in chunks]), np.int64, ends[-1])
    positions = np.fromiter(chain.from_iterable(map(range, starts, lengths)), np.int64, ends[-1])
    pages, offsets = np.divmod(positions, block_size)
    tables = _tables(chunks, [(length - 1) // block_size + 1 for length in lengths])
    slot_blocks = tables[np.repeat(np.arange(len(chunks)), counts), pages]
    first_logits = map(sub, ends, [chunk.num_logits for chunk in chunks])
    logit_rows = list(chain.from_iterable(map(range, first_logits, ends)))

    input_ids = to_device(tokens, device)
    unknown = [
        (end - 1, chunk.follows) for end, chunk in zip(ends, chunks, strict=True) if chunk.follows is not None
    ]
    if drawn is not None and unknown:
        rows, entries = to_device(np.array(unknown, np.int64).T.copy(), device)
        input_ids.index_copy_(0, rows, drawn.index_select(0, entries))

    return PackedBatch(
        input_ids=input_ids[None],
        position_ids=to_device(positions, device)[None],
        logit_rows=to_device(np.array(logit_rows, np.int64), device),
        slot_blocks=to_device(slot_blocks.astype(np.int64), device),
        slot_offsets=to_device(offsets, device),
        spans=spans,
        block_tables=tables,
    )


def to_device(array: npt.NDArray[np.int32] | npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """The array on the device, without a wait: a GPU copies by itself only what lies in pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _tables(chunks: Sequence[Chunk], widths: list[int]) -> npt.NDArray[np.int32]:
    """Block tables, padded. One may run ahead of the tokens; only the blocks that hold some are copied."""
    held = [chunk.block_table[:width] for chunk, width in zip(chunks, widths, strict=True)]
    flat = np.fromiter(chain.from_iterable(held), np.int32, sum(widths))
    tables = np.zeros((len(widths), max(widths)), np.int32)
    tables[np.arange(tables.shape[1]) < np.array(widths)[:, None]] = flat
    return tables
