"""Weights in panels of 16 outputs, and products with them.

[outputs / 16, inputs, 8] uint32: the upper halves of outputs 0 and 8, 1 and 9 ... 7 and 15, at one input
[outputs / 16, inputs, 16] float32: outputs 0 to 15 at one input
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload

from engine.register_tile import PANEL, UPPER_HALVES, WHOLE, PanelKind, register_tile, stay_apart
from engine.shares import take

_ROWS_AT_ONCE = 96
"""Rows for which all panels are read before the next: they stay in a core's cache."""


def pack_halves(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """The upper halves of `[N, K]` as `[N / 16, K, 8]`, outputs of zeros added to the last panel."""
    outputs, inputs = weight.shape
    count = -(-outputs // PANEL)
    halves = np.zeros((count * PANEL, inputs), np.uint32)
    np.right_shift(weight.view(np.uint32), 16, out=halves[:outputs])
    low, high = halves.reshape(count, 2, PANEL // 2, inputs).swapaxes(0, 1)
    return np.ascontiguousarray((low | high << 16).swapaxes(1, 2))


def pack_whole(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """`[N, K]` as `[N / 16, K, 16]`, outputs of zeros added to the last panel."""
    outputs, inputs = weight.shape
    count = -(-outputs // PANEL)
    panels = np.zeros((count, inputs, PANEL), np.float32)
    whole = outputs // PANEL
    panels[:whole] = weight[: whole * PANEL].reshape(whole, PANEL, inputs).swapaxes(1, 2)
    if whole < count:
        panels[whole, :, : outputs - whole * PANEL] = weight[whole * PANEL :].T
    return panels


@numba.njit  # type: ignore[untyped-decorator]
def row_blocks(rows: Any) -> Any:
    """How many blocks of rows a product is made in, all panels of one before the next."""
    return (rows + _ROWS_AT_ONCE - 1) // _ROWS_AT_ONCE


@numba.njit  # type: ignore[untyped-decorator]
def row_block(rows: Any, block: Any) -> Any:
    """First and end of one of them."""
    blocks = row_blocks(rows)
    return rows * block // blocks, rows * (block + 1) // blocks


_FEW_ROWS = 16


@numba.njit  # type: ignore[untyped-decorator]
def least_share(rows: Any) -> Any:
    """Panels that are worth a share of their own: a few rows are done with one before the next has been fetched."""
    return 4 if rows <= _FEW_ROWS else 1


@numba.njit  # type: ignore[untyped-decorator]
def shares(taken: Any, rows: Any, panels: Any, unit: Any, parts: Any) -> Any:
    """What one of so many threads takes of a product, as it comes free: rows from and to, panels from and to.

    Args:
        taken: `[row_blocks(rows)]` int64, zeros before the loop that all threads go through.
        unit: panels, see `take`.
    """
    for block in range(row_blocks(rows)):
        top, bottom = row_block(rows, block)
        first, end = take(taken[block:], panels, unit, parts)
        while first < end:
            yield top, bottom, first, end
            first, end = take(taken[block:], panels, unit, parts)


_MOST_ROWS = 6
"""Of a tile."""


def _tile_of(kind: PanelKind) -> Any:
    """A function of a kernel: the tile of so many rows and panels, by addresses; see `register_tile`."""
    _1x1, _2x1, _3x1, _4x1, _5x1, _6x1 = (register_tile(rows, 1, kind) for rows in range(1, _MOST_ROWS + 1))
    _1x4, _2x2 = register_tile(1, 4, kind), register_tile(2, 2, kind)

    @numba.njit  # type: ignore[untyped-decorator]
    def tile(
        rows: Any,
        panels: Any,
        x: Any,
        w: Any,
        inputs: Any,
        step: Any,
        plus: Any,
        plus_step: Any,
        out: Any,
        out_step: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> None:
        if rows == 6:
            _6x1(x, inputs, w, step, inputs, plus, plus_step, out, out_step, ahead, ahead_step)
        elif rows == 5:
            _5x1(x, inputs, w, step, inputs, plus, plus_step, out, out_step, ahead, ahead_step)
        elif rows == 4:
            _4x1(x, inputs, w, step, inputs, plus, plus_step, out, out_step, ahead, ahead_step)
        elif rows == 3:
            _3x1(x, inputs, w, step, inputs, plus, plus_step, out, out_step, ahead, ahead_step)
        elif rows == 2 and panels == 2:
            _2x2(x, inputs, w, step, inputs, plus, plus_step, out, out_step, ahead, ahead_step)
        elif rows == 2:
            _2x1(x, inputs, w, step, inputs, plus, plus_step, out, out_step, ahead, ahead_step)
        elif panels == 4:
            _1x4(x, inputs, w, step, inputs, plus, plus_step, out, out_step, ahead, ahead_step)
        else:
            _1x1(x, inputs, w, step, inputs, plus, plus_step, out, out_step, ahead, ahead_step)

    return tile


_tile_of_halves, _tile_of_whole = _tile_of(UPPER_HALVES), _tile_of(WHOLE)


def _tile(weight: Any, *arguments: Any) -> None:
    """The tile that fits the weights."""
    raise NotImplementedError


@overload(_tile, jit_options={"forceinline": True})  # type: ignore[untyped-decorator]
def _tile_for(weight: Any, *arguments: Any) -> Any:  # noqa: ARG001
    tile = _tile_of_whole if weight.dtype == types.float32 else _tile_of_halves

    def call(weight: Any, *arguments: Any) -> None:  # noqa: ARG001
        tile(*arguments)

    return call


@numba.njit  # type: ignore[untyped-decorator]
def multiply_panels(
    x: Any,  # [M, K] float32
    weight: Any,  # [P, K, 8] uint32 or [P, K, 16] float32
    first: Any,
    end: Any,  # panels
    plus: Any,  # address of what is added to the first panel's sums, in row 0
    plus_step: Any,  # numbers from one row of it to the next; 0: to all rows the same
    out: Any,  # [M, N]
    column: Any,  # of the first panel's outputs
) -> None:
    """Outputs of some panels. Rows go in tiles of at most six, as equal as can be.

    One row takes four panels at once and two take two: eight sums keep a core's two multipliers busy. While more rows
    use a panel, each of their tiles fetches a part of the next one: a tenth to a fifth less time for 3 to 128 rows.
    """
    stay_apart()
    rows, inputs = x.shape
    at_once = weight.shape[2] * 4
    size = inputs * at_once
    tiles = (rows + _MOST_ROWS - 1) // _MOST_ROWS
    most = 4 if rows == 1 else 2 if rows == 2 else 1
    ahead_step = (at_once + tiles - 1) // tiles if rows > 2 else 0
    panel = first
    while panel < end:
        panels = most if panel + most <= end else 1
        passed = (panel - first) * PANEL
        w = weight.ctypes.data + panel * size
        for tile in range(tiles):
            row, end_row = rows * tile // tiles, rows * (tile + 1) // tiles
            _tile(
                weight,
                end_row - row,
                panels,
                x.ctypes.data + row * inputs * 4,
                w,
                inputs,
                size,
                plus + (row * plus_step + passed) * 4,
                plus_step,
                out.ctypes.data + (row * out.shape[1] + column + passed) * 4,
                out.shape[1],
                w + size + inputs * tile * ahead_step,
                ahead_step,
            )
        panel += panels
