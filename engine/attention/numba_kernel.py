"""Decode attention on a CPU: one new token a sequence, its past in blocks, compiled by Numba.

    units           sequence 0: head 0, head 1 | sequence 1: head 0, head 1 | ...      (key-value heads)
    part_starts     cut so that each thread reads about as many tokens as the others

A unit stores the new key and value, then walks its blocks once with an online softmax (Milakov and
Gimelshein 2018): per block the scores of all query heads of the group, one rescale, one pass over the values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

# Sums may be reordered (else nothing is vectorized); infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


def _as_float32(number: Any) -> Any:
    raise NotImplementedError


@overload(_as_float32)  # type: ignore[untyped-decorator]
def _as_float32_overload(number: Any) -> Any:
    """float32 as it is; a uint16 is the upper half of a float32, that is a bfloat16."""

    def same(number: Any) -> Any:
        return number

    def widened(number: Any) -> Any:
        return np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)

    return same if number == types.float32 else widened


def _from_float32(number: Any, like: Any) -> Any:
    raise NotImplementedError


@overload(_from_float32)  # type: ignore[untyped-decorator]
def _from_float32_overload(number: Any, like: Any) -> Any:  # noqa: ARG001
    """To the storage type of `like`; to bfloat16 it is rounded to nearest even."""

    def same(number: Any, like: Any) -> Any:  # noqa: ARG001
        return number

    def rounded(number: Any, like: Any) -> Any:  # noqa: ARG001
        bits = np.float32(number).view(np.uint32)
        return np.uint16(
            (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        )

    return same if like == types.float32 else rounded


@numba.njit(fastmath=_FAST)  # type: ignore[untyped-decorator]
def _exp(x: Any) -> Any:
    """e**x for x <= 0 within 2 ulp: 2**n by the exponent bits, the rest by a polynomial (Cephes, expf).

    libm's exp is a call a number, which keeps the loop around it from being vectorized.
    """
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@functools.cache
def decode_kernel(group: int, head_dim: int) -> Callable[..., None]:
    """The kernel for `group` query heads a key-value head of `head_dim` numbers: as constants they unroll
    the loops.
    """

    def decode(
        query: Any,  # [T, N * group, head_dim]
        key: Any,  # [T, N, head_dim]
        value: Any,  # [T, N, head_dim]
        key_blocks: Any,  # [blocks, N, block_size, head_dim]
        value_blocks: Any,  # [blocks, N, block_size, head_dim]
        out: Any,  # [T, N * group, head_dim]
        rows: Any,  # [S] int32: row of each sequence
        tables: Any,  # [S, W] int32
        lengths: Any,  # [S] int32: tokens of each sequence, the new one among them
        first_seen: Any,  # [S] int32: first token its window shows
        part_starts: Any,  # [threads + 1] int32, in units
        scaling: Any,
    ) -> None:
        kv_heads = key.shape[1]
        block_size = key_blocks.shape[2]
        for part in numba.prange(part_starts.shape[0] - 1):
            scores = np.empty((group, block_size), np.float32)
            scaled = np.empty((group, head_dim), np.float32)
            acc = np.empty((group, head_dim), np.float32)
            top = np.empty(group, np.float32)
            total = np.empty(group, np.float32)
            for unit in range(part_starts[part], part_starts[part + 1]):
                s = unit // kv_heads
                h = unit % kv_heads
                row = rows[s]
                last = lengths[s] - 1
                for d in range(head_dim):
                    key_blocks[tables[s, last // block_size], h, last % block_size, d] = key[row, h, d]
                    value_blocks[tables[s, last // block_size], h, last % block_size, d] = value[row, h, d]
                for g in range(group):
                    top[g] = -np.inf
                    total[g] = np.float32(0.0)
                    for d in range(head_dim):
                        scaled[g, d] = _as_float32(query[row, h * group + g, d]) * scaling
                        acc[g, d] = np.float32(0.0)
                for page in range(first_seen[s] // block_size, last // block_size + 1):
                    keys = key_blocks[tables[s, page], h]
                    values = value_blocks[tables[s, page], h]
                    begin = max(first_seen[s] - page * block_size, 0)
                    end = min(lengths[s] - page * block_size, block_size)
                    for t in range(begin, end):
                        for g in range(group):
                            dot = np.float32(0.0)
                            for d in range(head_dim):
                                dot += scaled[g, d] * _as_float32(keys[t, d])
                            scores[g, t] = dot
                    for g in range(group):
                        highest = top[g]
                        for t in range(begin, end):
                            highest = max(highest, scores[g, t])
                        shrink = _exp(top[g] - highest)
                        top[g] = highest
                        summed = np.float32(0.0)
                        for t in range(begin, end):
                            scores[g, t] = _exp(scores[g, t] - highest)
                            summed += scores[g, t]
                        total[g] = total[g] * shrink + summed
                        for d in range(head_dim):
                            acc[g, d] *= shrink
                    for t in range(begin, end):
                        for g in range(group):
                            weight = scores[g, t]
                            for d in range(head_dim):
                                acc[g, d] += weight * _as_float32(values[t, d])
                for g in range(group):
                    for d in range(head_dim):
                        out[row, h * group + g, d] = _from_float32(
                            acc[g, d] / total[g], out[row, h * group + g, d]
                        )

    compiled: Callable[..., None] = numba.njit(parallel=True, cache=True, fastmath=_FAST)(decode)
    return compiled
