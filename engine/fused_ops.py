"""The kernels of `engine/fused_kernels.py` on tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from engine.fused_kernels import add_norm, gated, split_rotated


class Norm:
    """An RMSNorm as the kernels take it."""

    def __init__(self, module: Any) -> None:
        """None: there is no norm here."""
        self.weight = np.empty(0, np.float32) if module is None else module.weight.detach().numpy()
        self.eps = np.float32(0 if module is None else _eps(module))


def _eps(norm: nn.Module) -> float:
    """What it adds to the mean of squares, under either name that transformers has for it."""
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0.0)


def normed(hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
    """RMSNorm of `[T, C]`."""
    out, rows = torch.empty_like(hidden), hidden.numpy()
    add_norm(rows, rows[:0], norm.weight, norm.eps, rows, out.numpy())
    return out


def add_normed(hidden: torch.Tensor, added: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """`hidden + added`, `[T, C]`, and its RMSNorm."""
    total, out = torch.empty_like(hidden), torch.empty_like(hidden)
    add_norm(hidden.numpy(), added.numpy(), norm.weight, norm.eps, total.numpy(), out.numpy())
    return total, out


def split(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: tuple[Norm, Norm], kv_heads: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries `[T, H, D]`, keys and values `[T, N, D]` of `[T, (H + 2 * N) * D]`, which is written to.

    Args:
        cos: `[T, R]`, even and at most `D`: the first R numbers of each head are rotated.
        norms: of each head of the queries and of the keys.
        kv_heads: N.
        dim: D.
    """
    rows, width = qkv.shape
    heads = width // dim - 2 * kv_heads
    query, key, value = (qkv.new_empty(rows, count, dim) for count in (heads, kv_heads, kv_heads))
    of_query, of_key = norms
    arguments = (qkv.numpy(), cos.numpy(), sin.numpy(), of_query.weight, of_key.weight, of_query.eps)
    split_rotated(*arguments, query.numpy(), key.numpy(), value.numpy())
    return query, key, value


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """`[T, I]`: SiLU of the first half of `[T, 2 * I]`, times the second."""
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    gated(gate_up.numpy(), out.numpy())
    return out
