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

from engine.attention.numba_numbers import as_float32, from_float32, scale_of, store

# Sums may be reordered (else nothing is vectorized); infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


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
        key_blocks: Any,  # [blocks, N, block_size, stored_dim(head_dim)]
        value_blocks: Any,
        key_scales: Any,  # int8: the same memory as float32; else None
        value_scales: Any,
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
                place = (tables[s, last // block_size], h, last % block_size)
                store(key_blocks, key_scales, place, key[row, h])
                store(value_blocks, value_scales, place, value[row, h])
                for g in range(group):
                    top[g] = -np.inf
                    total[g] = np.float32(0.0)
                    for d in range(head_dim):
                        scaled[g, d] = as_float32(query[row, h * group + g, d]) * scaling
                        acc[g, d] = np.float32(0.0)
                for page in range(first_seen[s] // block_size, last // block_size + 1):
                    block = tables[s, page]
                    keys = key_blocks[block, h]
                    values = value_blocks[block, h]
                    begin = max(first_seen[s] - page * block_size, 0)
                    end = min(lengths[s] - page * block_size, block_size)
                    for t in range(begin, end):
                        for g in range(group):
                            dot = np.float32(0.0)
                            for d in range(head_dim):
                                dot += scaled[g, d] * as_float32(keys[t, d])
                            scores[g, t] = dot * scale_of(key_scales, block, h, t)
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
                        scale = scale_of(value_scales, block, h, t)
                        for g in range(group):
                            weight = scores[g, t] * scale
                            for d in range(head_dim):
                                acc[g, d] += weight * as_float32(values[t, d])
                for g in range(group):
                    for d in range(head_dim):
                        out[row, h * group + g, d] = from_float32(
                            acc[g, d] / total[g], out[row, h * group + g, d]
                        )

    compiled: Callable[..., None] = numba.njit(parallel=True, cache=True, fastmath=_FAST)(decode)
    return compiled
