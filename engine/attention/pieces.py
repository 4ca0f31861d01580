"""A step's chunks cut into pieces of work for the CPU kernel.

    chunk of one row, or few        one tile; its pages are cut where they are many    [-------][-------][------]
    chunk of many rows              tiles of TILE_ROWS rows, each over all its pages   [--------]
                                                                                       [----------]
                                                                                       [------------]

Where a sequence is cut depends on nothing but its own length and window, so neighbours change no answer. The tiles of
one chunk read what others of them store, so these rows are stored before all else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.attention.batch import PackedBatch

Ints = npt.NDArray[np.int32]

TILE_ROWS = 8
"""Rows that share a page once it is read."""
PIECE_TOKENS = 512
"""A tile's tokens are cut into pieces of about so many."""
ROW, ROWS, START, TABLE, FIRST, END, SLOT, STORES = range(8)
"""A piece: its first row and how many, the position of the first, the line of the block table, the first page and one
past the last, where its sums go (-1: it is the only piece of its rows), whether it stores its rows' keys and values.
"""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a step for layers of one window."""

    pieces: Ints
    """`[P, 8]`."""
    joins: Ints
    """`[J, 4]`: first row, rows, first slot, pieces of each tile that was cut."""
    slots: int
    """Rows of sums that the cut tiles need."""
    work: Ints
    """`[P]`: rows times tokens, roughly."""


def cut(batch: PackedBatch, block_size: int, window: int | None) -> Pieces:
    """The pieces of a step.

    Args:
        window: tokens a row sees, itself among them. None: all before it.
    """
    pieces: list[tuple[int, ...]] = []
    joins: list[tuple[int, ...]] = []
    slots = 0
    for index, span in enumerate(batch.spans):
        alone = span.num_rows <= TILE_ROWS
        for done in range(0, span.num_rows, TILE_ROWS):
            rows = min(TILE_ROWS, span.num_rows - done)
            row, start = span.first_row + done, span.start + done
            first = 0 if window is None else max(0, start - window + 1) // block_size
            end = (start + rows - 1) // block_size + 1
            count = -(-(end - first) * block_size // PIECE_TOKENS) if alone else 1
            for i in range(count):
                low, high = ((end - first) * j // count + first for j in (i, i + 1))
                slot = -1 if count == 1 else slots + i * rows
                pieces.append((row, rows, start, index, low, high, slot, alone))
            if count > 1:
                joins.append((row, rows, slots, count))
                slots += count * rows
    array = np.array(pieces, np.int32)
    work = array[:, ROWS] * (array[:, END] - array[:, FIRST]) * block_size
    return Pieces(array, np.array(joins, np.int32).reshape(-1, 4), slots, work)


def rows_of_many_tiles(batch: PackedBatch) -> npt.NDArray[np.int64] | None:
    """The rows whose chunk is more than one tile; None where there are none."""
    rows = [np.arange(span.first_row, span.end_row) for span in batch.spans if span.num_rows > TILE_ROWS]
    return np.concatenate(rows) if rows else None
