"""Attention on a CPU over KV in blocks, compiled by Numba: decodes and chunks of prompts alike.

    unit            a piece of work (`engine.attention.pieces`) of one key-value head: at most TILE_ROWS rows of a
                    sequence times the query heads of the group, over some of the sequence's pages
    share_starts    units cut so that each share is about as much to do as the others; threads take shares as they
                    come free (`engine.shares`)

A unit stores its rows' keys and values, then goes over its pages a stretch at a time: scores of all its queries page
by page, one softmax (online over the stretches: Milakov and Gimelshein 2018), values page by page. So a page is
widened to float32 once for all queries. Where a sequence is cut into several pieces their sums are joined
(flash-decoding).

The page _AHEAD tokens later is asked for while one is computed, a few lines a query: pages lie in no order, so the
processor cannot guess them. All lines at once wait for each other: that left two thirds of the gain (bench/NOTES.md).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from engine.attention.eight import (
    add,
    add_weighted,
    exp,
    highest_of,
    larger,
    load,
    multiply,
    prefetch,
    products_with_eight,
    put,
    shown,
    splat,
    subtract,
    sum_of,
)
from engine.attention.numba_numbers import store
from engine.attention.pieces import END, FIRST, ROW, ROWS, SLOT, START, STORES, TABLE, TILE_ROWS
from engine.shares import take

# Sums may be reordered (else nothing is vectorized); infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_ALONE: dict[str, Any] = {"fastmath": _FAST, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_INLINE: dict[str, Any] = {**_ALONE, "forceinline": True}
_STRETCH = 128
"""Tokens of one softmax."""
_AHEAD = 32
"""Tokens between what is computed and what is asked for, at least a page: a page of 8 is computed before the next has
come from memory.
"""
_LINE = 16
"""Numbers of a cache line; of narrower ones more, then a line is asked for twice."""
_ZERO = np.float32(0)
_NO_SCORE = np.float32(-np.inf)


@numba.njit(fastmath=_FAST)  # type: ignore[untyped-decorator]
def exp_nonpositive(x: Any) -> Any:
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


@numba.njit(parallel=True, cache=True, fastmath=_FAST)  # type: ignore[untyped-decorator]
def attend(
    query: Any,  # [T, H, dim], dim a multiple of 8
    key: Any,  # [T, N, dim]
    value: Any,  # [T, N, dim]
    key_blocks: Any,  # [blocks, N, block_size, stored_dim(dim)]
    value_blocks: Any,
    key_scales: Any,  # int8: the same memory as float32; else None
    value_scales: Any,
    out: Any,  # [T, H, dim]
    tables: Any,  # [S, W] int32
    pieces: Any,  # [P, 8] int32, see `engine.attention.pieces`
    joins: Any,  # [J, 4] int32
    sums: Any,  # [slots * H * (dim + 2)] float32: of unfinished pieces
    share_starts: Any,  # [shares + 1] int64, in units
    threads: int,
    window: Any,  # tokens a row sees, itself among them
    scaling: Any,
) -> None:
    """Attention of all rows, their keys and values stored."""
    shares, taken = share_starts.shape[0] - 1, np.zeros(1, np.int64)
    for _ in numba.prange(threads):
        first, end = take(taken, shares, 1, threads)
        while first < end:
            _attend_units(
                query,
                key,
                value,
                key_blocks,
                value_blocks,
                key_scales,
                value_scales,
                out,
                tables,
                pieces,
                sums,
                share_starts[first],
                share_starts[end],
                window,
                scaling,
            )
            first, end = take(taken, shares, 1, threads)
    for index in range(joins.shape[0]):
        _join(out.reshape(out.size), query.shape[1], sums, joins[index], query.shape[2])


@numba.njit(**_ALONE)  # type: ignore[untyped-decorator]
def _attend_units(
    query: Any,
    key: Any,
    value: Any,
    key_blocks: Any,
    value_blocks: Any,
    key_scales: Any,
    value_scales: Any,
    out: Any,
    tables: Any,
    pieces: Any,
    sums: Any,
    first_unit: Any,
    end_unit: Any,
    window: Any,
    scaling: Any,
) -> None:
    """A thread's share."""
    heads, kv_heads, dim, block_size = query.shape[1], key.shape[1], query.shape[2], key_blocks.shape[2]
    queries, answers = query.reshape(query.size), out.reshape(out.size)
    keys, values = key_blocks.reshape(key_blocks.size), value_blocks.reshape(value_blocks.size)
    group = heads // kv_heads
    pages = max(1, _STRETCH // block_size)
    wide = (block_size + 7) // 8 * 8
    scratch = _scratch(TILE_ROWS * group, dim, pages, wide)
    for unit in range(first_unit, end_unit):
        piece, h = pieces[unit // kv_heads], unit % kv_heads
        table = tables[piece[TABLE]]
        if piece[STORES]:
            _store_rows(key, value, key_blocks, value_blocks, key_scales, value_scales, table, piece, h)
        _begin(queries, heads, piece, h, scratch, scaling, group, dim)
        for first in range(piece[FIRST], piece[END], pages):
            end = min(first + pages, piece[END])
            step = (piece, h, table, first, end, window, pages * wide, wide)
            _score(keys, values, key_scales, key_blocks.shape, step, scratch, group, dim)
            _weigh(piece[ROWS] * group, (end - first) * wide, pages * wide, scratch)
            _add(values, keys, value_scales, value_blocks.shape, step, scratch, group, dim)
        _finish(answers, heads, sums, piece, h, scratch, group, dim)


@numba.njit(**_INLINE)  # type: ignore[untyped-decorator]
def _scratch(queries: Any, dim: Any, pages: Any, wide: Any) -> Any:
    """What a thread works in: scaled queries, scores then weights, sums of values, a widened page, and of each query
    the highest score, the sum of weights, and what earlier sums are multiplied by.
    """
    return (
        np.empty(queries * dim, np.float32),
        np.empty(queries * pages * wide, np.float32),
        np.empty(queries * dim, np.float32),
        np.empty(wide * dim, np.float32),
        np.empty(queries, np.float32),
        np.empty(queries, np.float32),
        np.empty(queries, np.float32),
    )


@numba.njit(**_INLINE)  # type: ignore[untyped-decorator]
def _store_rows(
    key: Any,
    value: Any,
    key_blocks: Any,
    value_blocks: Any,
    key_scales: Any,
    value_scales: Any,
    table: Any,
    piece: Any,
    h: Any,
) -> None:
    """Store what lies on the piece's pages: rows of a later page are another piece's."""
    block_size = key_blocks.shape[2]
    for r in range(piece[ROWS]):
        page, offset = divmod(piece[START] + r, block_size)
        if piece[FIRST] <= page < piece[END]:
            place = (table[page], h, offset)
            store(key_blocks, key_scales, place, key[piece[ROW] + r, h])
            store(value_blocks, value_scales, place, value[piece[ROW] + r, h])


@numba.njit(**_INLINE)  # type: ignore[untyped-decorator]
def _begin(
    query: Any, heads: Any, piece: Any, h: Any, scratch: Any, scaling: Any, group: Any, dim: Any
) -> None:
    scaled, _, acc, _, top, total, _ = scratch
    for r in range(piece[ROWS]):
        first = ((piece[ROW] + r) * heads + h * group) * dim
        for d in range(0, group * dim, 8):
            put(scaled, r * group * dim + d, multiply(load(query, first + d), splat(scaling)))
            put(acc, r * group * dim + d, splat(_ZERO))
    for q in range(piece[ROWS] * group):
        top[q], total[q] = _NO_SCORE, _ZERO


@numba.njit(**_INLINE)  # type: ignore[untyped-decorator]
def _seen(piece: Any, r: Any, page: Any, window: Any, block_size: Any) -> Any:
    """The tokens of a page that a row sees, from and to."""
    position = piece[START] + r - page * block_size
    return max(0, position + 1 - window), min(block_size, position + 1)


@numba.njit(**_INLINE)  # type: ignore[untyped-decorator]
def _place(shape: Any, block: Any, h: Any) -> Any:
    """Where a head's page begins."""
    return (block * shape[1] + h) * shape[2] * shape[3]


@numba.njit(**_INLINE)  # type: ignore[untyped-decorator]
def _open(blocks: Any, scales: Any, shape: Any, step: Any, page: Any, buffer: Any, dim: Any) -> Any:
    """What a piece's rows see of a page, from the first row's first token to the last one's last; see `_page`."""
    piece, h, table, _, _, window, _, _ = step
    begin, _ = _seen(piece, 0, page, window, shape[2])
    _, stop = _seen(piece, piece[ROWS] - 1, page, window, shape[2])
    here = _place(shape, table[page], h)
    return _page(blocks, scales, (here, begin, stop, shape[3], shape[2], buffer, dim))


@numba.njit(**_INLINE)  # type: ignore[untyped-decorator]
def _score(
    keys: Any, values: Any, scales: Any, shape: Any, step: Any, scratch: Any, group: Any, dim: Any
) -> None:
    """The scores of a stretch, page by page; -inf where a row sees nothing. The first page of values comes after."""
    piece, h, table, first, end, window, stretch, wide = step
    scaled, weights, _, buffer, _, _, _ = scratch
    page_size, queries = shape[2] * shape[3], piece[ROWS] * group
    share, ahead = (page_size + queries - 1) // queries, max(1, _AHEAD // shape[2])
    for page in range(first, end):
        numbers, k = _open(keys, scales, shape, step, page, buffer, dim)
        later = page + ahead
        coming = _place(shape, table[later if later < end else min(first + later - end, end - 1)], h)
        for r in range(piece[ROWS]):
            begin, stop = _seen(piece, r, page, window, shape[2])
            for q in range(r * group, (r + 1) * group):
                if later < end:
                    _fetch(keys, coming, page_size, q, share)
                else:
                    _fetch(values, coming, page_size, q, share)
                w = q * stretch + (page - first) * wide
                for t in range(0, wide, 8):
                    scores = products_with_eight(scaled, q * dim, numbers, k + t * dim, dim)
                    put(weights, w + t, shown(scores, t, begin, stop))


@numba.njit(**_INLINE)  # type: ignore[untyped-decorator]
def _weigh(queries: Any, count: Any, stretch: Any, scratch: Any) -> None:
    """Softmax of a stretch's scores, in place, undivided."""
    _, weights, _, _, top, total, shrink = scratch
    for q in range(queries):
        w = q * stretch
        eights = splat(top[q])
        for t in range(0, count, 8):
            eights = larger(load(weights, w + t), eights)
        highest = highest_of(eights)
        base = splat(highest if highest > _NO_SCORE else _ZERO)
        summed = splat(_ZERO)
        for t in range(0, count, 8):
            eights = exp(subtract(load(weights, w + t), base))
            put(weights, w + t, eights)
            summed = add(summed, eights)
        shrink[q] = highest_of(exp(subtract(splat(top[q]), base)))
        top[q], total[q] = highest, total[q] * shrink[q] + sum_of(summed)


@numba.njit(**_INLINE)  # type: ignore[untyped-decorator]
def _add(
    values: Any, keys: Any, scales: Any, shape: Any, step: Any, scratch: Any, group: Any, dim: Any
) -> None:
    """Add a stretch's weighted values, page by page. The first pages of the next stretch's keys come after."""
    piece, h, table, first, end, window, stretch, wide = step
    _, weights, acc, buffer, _, _, shrink = scratch
    page_size, queries = shape[2] * shape[3], piece[ROWS] * group
    share, ahead = (page_size + queries - 1) // queries, max(1, _AHEAD // shape[2])
    for page in range(first, end):
        numbers, v = _open(values, scales, shape, step, page, buffer, dim)
        later = page + ahead
        coming = _place(shape, table[min(later, piece[END] - 1)], h)
        for r in range(piece[ROWS]):
            begin, stop = _seen(piece, r, page, window, shape[2])
            count = max(0, stop - begin)
            for q in range(r * group, (r + 1) * group):
                if later < end:
                    _fetch(values, coming, page_size, q, share)
                else:
                    _fetch(keys, coming, page_size, q, share)
                scale = shrink[q] if page == first else np.float32(1)
                w = q * stretch + (page - first) * wide + begin
                add_weighted(acc, q * dim, scale, numbers, v + begin * dim, weights, w, count, dim)


@numba.njit(**_INLINE)  # type: ignore[untyped-decorator]
def _finish(out: Any, heads: Any, sums: Any, piece: Any, h: Any, scratch: Any, group: Any, dim: Any) -> None:
    """Write the answers, or what a join needs."""
    _, _, acc, _, top, total, _ = scratch
    for q in range(piece[ROWS] * group):
        r, head = q // group, h * group + q % group
        if piece[SLOT] < 0:
            share, place = splat(np.float32(1) / total[q]), ((piece[ROW] + r) * heads + head) * dim
            for d in range(0, dim, 8):
                put(out, place + d, multiply(load(acc, q * dim + d), share))
        else:
            place = ((piece[SLOT] + r) * heads + head) * (dim + 2)
            for d in range(0, dim, 8):
                put(sums, place + d, load(acc, q * dim + d))
            sums[place + dim], sums[place + dim + 1] = top[q], total[q]


@numba.njit(**_INLINE)  # type: ignore[untyped-decorator]
def _join(out: Any, heads: Any, sums: Any, join: Any, dim: Any) -> None:
    """Write the answers of rows whose tokens were cut into pieces."""
    first_row, rows, slot, count = join
    step = rows * heads * (dim + 2)
    for vector in range(rows * heads):
        place, answer = (slot * heads + vector) * (dim + 2), (first_row * heads + vector) * dim
        highest = _NO_SCORE
        for i in range(count):
            highest = max(highest, sums[place + i * step + dim])
        total = _ZERO
        for i in range(count):
            part = place + i * step
            sums[part + dim] = exp_nonpositive(sums[part + dim] - highest)
            total += sums[part + dim] * sums[part + dim + 1]
        for d in range(0, dim, 8):
            joined = splat(_ZERO)
            for i in range(count):
                part = place + i * step
                joined = add(joined, multiply(splat(sums[part + dim] / total), load(sums, part + d)))
            put(out, answer + d, joined)


@numba.njit(**_INLINE)  # type: ignore[untyped-decorator]
def _fetch(numbers: Any, page: Any, size: Any, q: Any, share: Any) -> None:
    """Ask for a query's share of a page: all lines at once would wait for each other."""
    for at in range(q * share, min(size, (q + 1) * share), _LINE):
        prefetch(numbers, page + at)


def _page(numbers: Any, scales: Any, place: Any) -> Any:
    """An array of float32, and where in it a page's first token stands. Only what lies from token `begin` to `end` is
    anything.
    """
    raise NotImplementedError


@overload(_page, jit_options=_INLINE)  # type: ignore[untyped-decorator]
def _page_of(numbers: Any, scales: Any, place: Any) -> Any:  # noqa: ARG001
    def in_place(numbers: Any, scales: Any, place: Any) -> Any:  # noqa: ARG001
        page, begin, end, stored, block_size, buffer, dim = place
        if block_size % 8 == 0:
            return numbers, page
        for t in range(begin, end):  # else eight tokens might reach past the store's end
            for d in range(0, dim, 8):
                put(buffer, t * dim + d, load(numbers, page + t * stored + d))
        return buffer, 0

    def widened(numbers: Any, scales: Any, place: Any) -> Any:  # noqa: ARG001
        page, begin, end, stored, _, buffer, dim = place
        for t in range(begin, end):
            for d in range(0, dim, 8):
                put(buffer, t * dim + d, load(numbers, page + t * stored + d))
        return buffer, 0

    def scaled(numbers: Any, scales: Any, place: Any) -> Any:
        page, begin, end, stored, _, buffer, dim = place
        flat = scales.reshape(scales.size)
        for t in range(begin, end):
            scale = splat(flat[(page + (t + 1) * stored) // 4 - 1])
            for d in range(0, dim, 8):
                put(buffer, t * dim + d, multiply(load(numbers, page + t * stored + d), scale))
        return buffer, 0

    if numbers.dtype == types.float32:
        return in_place
    return widened if scales in (None, types.none) else scaled
