"""Linear layers of a bfloat16 checkpoint on a CPU that computes in float32: half the bytes for a few rows.

A bfloat16 is the upper half of a float32, so where a checkpoint was bfloat16, the lower halves are zeros and the
products are the same without them:

    float32    s eeeeeeee mmmmmmm 0000000000000000
    kept       s eeeeeeee mmmmmmm                     widened in a register: a shift, no rounding

A step of a few rows is bound by reading weights. All linears and the head of SmolLM2-135M, two threads on two Zen 3
cores, quiet, ms a step (bench/NOTES.md):

    rows                1    2    4    6    8   12   16   24   32
    float32, packed    54   58   67   71   76   83   93  106  131
    upper halves       26   28   30   38   42   59   78  115  151

More rows are bound by arithmetic and go to oneDNN, so both layouts are kept: half as much memory again.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import nn

from engine.attention.numba_numbers import as_float32, bits
from engine.packed_linear import LinearKind, PackedLinear

FEW_ROWS = 16
"""Up to so many rows the halves are read."""
_FAST = {"reassoc", "contract", "nsz", "arcp"}


class HalvedLinear(PackedLinear):
    """A packed linear layer that keeps the upper halves of its weights too, where the lower ones are zeros."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._halves = linear.weight.data.to(torch.bfloat16) if is_bfloat16(linear.weight.data) else None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See `PackedLinear.multiply`."""
        if self._halves is None or x.numel() > FEW_ROWS * self.in_features:
            return super().multiply(x)
        out = x.new_empty(*x.shape[:-1], self.out_features)
        _multiply(
            x.reshape(-1, self.in_features).contiguous().numpy(),
            bits(self._halves),
            out.view(-1, self.out_features).numpy(),
            torch.get_num_threads(),
        )
        return out if self.bias is None else out.add_(self.bias)


def is_bfloat16(weight: torch.Tensor) -> bool:
    """Whether every number of a float32 tensor is one of bfloat16 too."""
    if weight.dtype != torch.float32:
        return False
    return not bool((weight.view(torch.int32) & 0xFFFF).any())


def linear_kind(model: nn.Module, room: int) -> LinearKind:
    """What a model's linear layers are to be replaced by.

    Args:
        room: bytes that are free once the KV store is full. The halves may take half of them.
    """
    halves = sum(
        2 * module.weight.numel()
        for module in model.modules()
        if type(module) is nn.Linear and is_bfloat16(module.weight.data)
    )
    return HalvedLinear if 0 < halves <= room // 2 else PackedLinear


@numba.njit(cache=True, parallel=True, fastmath=_FAST)  # type: ignore[untyped-decorator]
def _multiply(
    x: Any,  # [M, K] float32
    weight: Any,  # [N, K] uint16
    out: Any,  # [M, N] float32
    parts: int,
) -> None:
    """Each part takes its share of the outputs. Four rows at a time share a widened weight; fewer go one by one."""
    outputs, fours = weight.shape[0], x.shape[0] // 4 * 4
    for part in numba.prange(parts):
        for n in range(outputs * part // parts, outputs * (part + 1) // parts):
            for m in range(0, fours, 4):
                sum0 = sum1 = sum2 = sum3 = np.float32(0.0)
                for k in range(weight.shape[1]):
                    number = as_float32(weight[n, k])
                    sum0 += number * x[m, k]
                    sum1 += number * x[m + 1, k]
                    sum2 += number * x[m + 2, k]
                    sum3 += number * x[m + 3, k]
                out[m, n], out[m + 1, n], out[m + 2, n], out[m + 3, n] = sum0, sum1, sum2, sum3
            for m in range(fours, x.shape[0]):
                total = np.float32(0.0)
                for k in range(weight.shape[1]):
                    total += as_float32(weight[n, k]) * x[m, k]
                out[m, n] = total
