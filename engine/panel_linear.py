"""Linear layers that compute in float32 on a CPU, their weights in panels of 16 outputs (`engine/panels.py`).

A bfloat16 is the upper half of a float32, so where a checkpoint was bfloat16, the lower halves are zeros and nothing
is lost without them: half the bytes, and the same products.

    float32    s eeeeeeee mmmmmmm 0000000000000000
    kept       s eeeeeeee mmmmmmm                     widened in a register: a shift or a mask, no rounding

Other weights (a GGUF file's, a float32 checkpoint's) are kept whole.

All linears of SmolLM2-135M's layers, one thread of a Zen 3, busy machine, CPU ms a step, least of up to 8 in turns:

    rows                 1     2     4     8    16    32    64   128   512
    oneDNN, float32     57    66    80    99   114   152   255   436  1537
    panels of halves    20    25    24    35    60    83   165   334  1374

    oneDNN, float32     64          78   112   109   185         470  1688
    panels, whole       28          44    51    50   102         454  1603

oneDNN's own vectors are twice as long where there is AVX-512: there whole weights are left to it, and many rows, for
which it then has a layout of its own beside the halves.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from engine.packed_linear import LinearKind, PackedLinear
from engine.panels import least_share, multiply_panels, pack_halves, pack_whole, row_blocks, shares
from engine.register_tile import PANEL

FEW_ROWS = 16
"""Beside oneDNN, panels are for up to so many rows."""


class PanelLinear(PackedLinear):
    """A linear layer that keeps its weights in panels: alone, or the upper halves beside oneDNN's layout."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor | None:
        """See `PackedLinear.pack`."""
        self.panels = _panels(weight)
        if self.panels is not None:
            self.plus = np.zeros(len(self.panels) * PANEL, np.float32)
            if self.bias is not None:
                self.plus[: self.out_features] = self.bias.detach().numpy()
        return None if self.panels is not None and panels_alone() else super().pack(weight)

    @property
    def has_halves(self) -> bool:
        """Whether the panels hold upper halves of weights."""
        return self.panels is not None and self.panels.dtype == np.uint32

    @property
    def is_panels_alone(self) -> bool:
        """Whether there is no other layout beside the panels."""
        return self._packed is None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See `PackedLinear.multiply`."""
        if self.panels is None or not (self.is_panels_alone or x.numel() <= FEW_ROWS * self.in_features):
            return super().multiply(x)
        out = x.new_empty(*x.shape[:-1], self.out_features)
        _multiply(
            x.reshape(-1, self.in_features).contiguous().numpy(),
            self.panels,
            self.plus,
            out.view(-1, self.out_features).numpy(),
            torch.get_num_threads(),
        )
        return out


def panels_alone() -> bool:
    """Whether panels are faster than oneDNN for any number of rows here."""
    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("fma") and not features.get("avx512f"))


def _panels(weight: torch.Tensor) -> npt.NDArray[Any] | None:
    """The panels of a weight; None: oneDNN computes it."""
    if is_bfloat16(weight):
        return pack_halves(weight.numpy())
    return pack_whole(weight.numpy()) if weight.dtype == torch.float32 and panels_alone() else None


def is_bfloat16(weight: torch.Tensor) -> bool:
    """Whether every number of a float32 tensor is one of bfloat16 too."""
    if weight.dtype != torch.float32:
        return False
    return not bool((weight.view(torch.int32) & 0xFFFF).any())


def linear_kind(model: nn.Module, room: int) -> LinearKind:
    """What a model's linear layers are to be replaced by.

    Args:
        room: bytes that are free once the KV store is full. Halves beside oneDNN's layout may take half of them.
    """
    if panels_alone():
        return PanelLinear
    halves = sum(
        2 * module.weight.numel()
        for module in model.modules()
        if type(module) is nn.Linear and is_bfloat16(module.weight.data)
    )
    return PanelLinear if 0 < halves <= room // 2 else PackedLinear


@numba.njit(cache=True, parallel=True)  # type: ignore[untyped-decorator]
def _multiply(
    x: Any,  # [M, K] float32
    weight: Any,  # see `engine/panels.py`
    plus: Any,  # [P * 16] float32
    out: Any,  # [M, N] float32
    parts: int,
) -> None:
    """Threads take shares of the panels. A last panel that is not full has outputs in a place of their own."""
    rows, outputs, count = x.shape[0], out.shape[1], weight.shape[0]
    whole = outputs // PANEL
    taken = np.zeros(row_blocks(rows), np.int64)
    for _ in numba.prange(parts):
        for top, bottom, first, end in shares(taken, rows, count, least_share(rows), parts):
            some, made = x[top:bottom], out[top:bottom]
            more = plus[first * PANEL :].ctypes.data
            multiply_panels(some, weight, first, min(end, whole), more, 0, made, first * PANEL)
            if end > whole:
                rest = np.empty((bottom - top, PANEL), np.float32)
                more = plus[whole * PANEL :].ctypes.data
                multiply_panels(some, weight, whole, count, more, 0, rest, 0)
                made[:, whole * PANEL :] = rest[:, : outputs - whole * PANEL]
