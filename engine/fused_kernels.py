"""What lies between the matrix products of a decoder layer, one pass over the rows each, compiled by Numba.

    add_norm         a residual sum and its RMSNorm (Zhang and Sennrich 2019)
    split_rotated    queries, keys and values out of one product; norms a head; rotary positions (Su et al. 2021)
    gated            SiLU(gate) * up (Shazeer 2020) out of one product

torch takes 6, 14 and 2 operations for them. Each row is computed by itself, so it is the same in any batch. Rows are
shared among threads where there is enough to do: waking one takes 16 us.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import nn

from engine.attention.numba_kernel import _exp

# From so many numbers on rows are shared among threads: about 60 us of one.
_NORM_SHARED, _SPLIT_SHARED, _GATED_SHARED = 200_000, 100_000, 50_000

# Sums may be reordered, and a product and a sum made one; infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_jit = numba.njit(cache=True, fastmath=_FAST, error_model="numpy")
_jit_parallel = numba.njit(cache=True, parallel=True)


@_jit  # type: ignore[untyped-decorator]
def _add_norm(
    first: int,
    end: int,
    hidden: Any,  # [T, C]
    added: Any,  # [T, C], or [0, C]: nothing
    weight: Any,  # [C]
    eps: Any,
    total: Any,  # [T, C]: hidden + added; left alone if nothing is added
    out: Any,  # [T, C]
) -> None:
    size = weight.shape[0]
    for t in range(first, end):
        squares = np.float32(0.0)
        if added.shape[0]:
            for c in range(size):
                total[t, c] = hidden[t, c] + added[t, c]
                squares += total[t, c] * total[t, c]
        else:
            for c in range(size):
                squares += hidden[t, c] * hidden[t, c]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(size) + eps)
        row = total[t] if added.shape[0] else hidden[t]
        for c in range(size):
            out[t, c] = row[c] * scale * weight[c]


@_jit_parallel  # type: ignore[untyped-decorator]
def _add_norm_shared(
    parts: int, hidden: Any, added: Any, weight: Any, eps: Any, total: Any, out: Any
) -> None:
    rows = out.shape[0]
    for part in numba.prange(parts):
        _add_norm(rows * part // parts, rows * (part + 1) // parts, hidden, added, weight, eps, total, out)


@_jit  # type: ignore[untyped-decorator]
def _head(vector: Any, weight: Any, eps: Any, cos: Any, sin: Any, out: Any) -> None:
    """One head of one row: its norm, if `weight` has numbers, then the rotation of its first `len(cos)` numbers."""
    size, half = vector.shape[0], cos.shape[0] // 2
    if weight.shape[0]:
        squares = np.float32(0.0)
        for d in range(size):
            squares += vector[d] * vector[d]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(size) + eps)
        for d in range(size):
            vector[d] = vector[d] * scale * weight[d]
    for d in range(half):
        out[d] = vector[d] * cos[d] - vector[half + d] * sin[d]
        out[half + d] = vector[half + d] * cos[half + d] + vector[d] * sin[half + d]
    for d in range(2 * half, size):
        out[d] = vector[d]


@_jit  # type: ignore[untyped-decorator]
def _split_rotated(
    first: int,
    end: int,
    qkv: Any,  # [T, (H + 2 * N) * D]; the norms are made in it
    cos: Any,  # [T, R], R <= D
    sin: Any,
    query_weight: Any,  # [D], or [0]: no norm
    key_weight: Any,
    eps: Any,
    query: Any,  # [T, H, D]
    key: Any,  # [T, N, D]
    value: Any,  # [T, N, D]
) -> None:
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[2]
    for t in range(first, end):
        for h in range(heads):
            _head(qkv[t, h * dim : (h + 1) * dim], query_weight, eps, cos[t], sin[t], query[t, h])
        at = heads * dim
        for h in range(kv_heads):
            _head(qkv[t, at + h * dim : at + (h + 1) * dim], key_weight, eps, cos[t], sin[t], key[t, h])
        at += kv_heads * dim
        for h in range(kv_heads):
            for d in range(dim):
                value[t, h, d] = qkv[t, at + h * dim + d]


@_jit_parallel  # type: ignore[untyped-decorator]
def _split_rotated_shared(
    parts: int,
    qkv: Any,
    cos: Any,
    sin: Any,
    query_weight: Any,
    key_weight: Any,
    eps: Any,
    query: Any,
    key: Any,
    value: Any,
) -> None:
    rows = qkv.shape[0]
    for part in numba.prange(parts):
        _split_rotated(
            rows * part // parts,
            rows * (part + 1) // parts,
            qkv,
            cos,
            sin,
            query_weight,
            key_weight,
            eps,
            query,
            key,
            value,
        )


@_jit  # type: ignore[untyped-decorator]
def _gated(
    first: int,
    end: int,
    gate_up: Any,  # [T, 2 * I]
    out: Any,  # [T, I]
) -> None:
    size = out.shape[1]
    for t in range(first, end):
        gate, up, row = gate_up[t, :size], gate_up[t, size:], out[t]
        for i in range(size):
            # The exponential of what is not positive does not overflow, and no branch keeps it from being vectorized.
            small = _exp(-abs(gate[i]))
            part = np.float32(1.0) if gate[i] >= 0 else small
            row[i] = gate[i] * part / (np.float32(1.0) + small) * up[i]


@_jit_parallel  # type: ignore[untyped-decorator]
def _gated_shared(parts: int, gate_up: Any, out: Any) -> None:
    rows = out.shape[0]
    for part in numba.prange(parts):
        _gated(rows * part // parts, rows * (part + 1) // parts, gate_up, out)


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
    threads = _threads(hidden, _NORM_SHARED)
    _call(_add_norm, _add_norm_shared, threads, rows, rows[:0], norm.weight, norm.eps, rows, out.numpy())
    return out


def add_normed(hidden: torch.Tensor, added: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """`hidden + added`, `[T, C]`, and its RMSNorm."""
    total, out = torch.empty_like(hidden), torch.empty_like(hidden)
    arguments = (hidden.numpy(), added.numpy(), norm.weight, norm.eps, total.numpy(), out.numpy())
    _call(_add_norm, _add_norm_shared, _threads(hidden, _NORM_SHARED), *arguments)
    return total, out


def split_rotated(
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
    made = (query.numpy(), key.numpy(), value.numpy())
    _call(_split_rotated, _split_rotated_shared, _threads(qkv, _SPLIT_SHARED), *arguments, *made)
    return query, key, value


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """`[T, I]`: SiLU of the first half of `[T, 2 * I]`, times the second."""
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    _call(_gated, _gated_shared, _threads(out, _GATED_SHARED), gate_up.numpy(), out.numpy())
    return out


def _threads(rows: torch.Tensor, enough: int) -> int:
    """Those among which it pays to share so many numbers."""
    return torch.get_num_threads() if rows.numel() >= enough else 1


def _call(alone: Any, shared: Any, threads: int, *arguments: Any) -> None:
    if threads == 1:
        alone(0, arguments[-1].shape[0], *arguments)
    else:
        shared(threads, *arguments)
