"""The two halves of a fused decoder layer around attention, where its linear layers are panels: one call each.

    before   normed = norm(rows)     | whole heads = panels * normed, rotated |
    after                            | total = rows + panels * attended       | normed = norm(total)
             | gates and ups = panels * normed, SiLU(gate) * up |               | total += panels * that |

What stands between bars is shared among threads, which take shares of the panels as they come free. No tensor is
made in between: 30 layers of one row spent more time on making tensors than on what is no product.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from engine.fused_kernels import add_norm, gated_row, turn_head
from engine.fused_ops import Norm
from engine.panel_linear import PanelLinear
from engine.panels import least_share, multiply_panels, row_blocks, shares
from engine.register_tile import PANEL


class PanelSteps:
    """The arrays of one layer."""

    def __init__(self, linears: list[PanelLinear], norms: list[Norm], kv_heads: int, head_dim: int) -> None:
        """
        Args:
            linears: queries with keys and values, outputs of attention, gates with ups, down; `fit` together.
            norms: of the layer's input, of queries, of keys, of the MLP's input.
        """
        qkv, attended, gates_and_ups, down = ((linear.panels, linear.plus) for linear in linears)
        before, of_query, of_key, after = norms
        self._before = (before.weight, before.eps, *qkv)
        self._heads = (of_query.weight, of_key.weight, of_query.eps)
        self._after = (*attended, after.weight, after.eps, *gates_and_ups, *down)
        self._shape = (linears[0].out_features // head_dim - 2 * kv_heads, kv_heads, kv_heads), head_dim

    def before(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[T, H, D]`, keys and values `[T, N, D]` of rows `[T, C]`, cosines and sines `[T, R]`."""
        heads, head_dim = self._shape
        query, key, value = (hidden.new_empty(len(hidden), count, head_dim) for count in heads)
        made = (query.numpy(), key.numpy(), value.numpy())
        threads = torch.get_num_threads()
        _before(threads, hidden.numpy(), *self._before, cos.numpy(), sin.numpy(), *self._heads, *made)
        return query, key, value

    def after(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output `[T, C]`, of its input and the output of attention, `[T, H, D]`."""
        out = torch.empty_like(hidden)
        _after(
            torch.get_num_threads(), hidden.numpy(), attended.flatten(1).numpy(), *self._after, out.numpy()
        )
        return out


def fit(linears: list[Any], head_dim: int) -> bool:
    """Whether linear layers are panels of upper halves, all of them full, and of one head each.

    Of whole weights they are not, which would be a second set of kernels: 20 s of compiling at the first start.
    """
    return head_dim % PANEL == 0 and all(
        isinstance(linear, PanelLinear)
        and linear.is_panels_alone
        and linear.has_halves
        and linear.out_features % PANEL == linear.in_features % PANEL == 0
        for linear in linears
    )


@numba.njit(cache=True, parallel=True)  # type: ignore[untyped-decorator]
def _before(
    parts: int,
    hidden: Any,  # [T, C]
    norm_weight: Any,
    norm_eps: Any,
    weight: Any,  # [P, C, 8]
    plus: Any,  # [P * 16]
    cos: Any,
    sin: Any,
    query_weight: Any,
    key_weight: Any,
    head_eps: Any,
    query: Any,
    key: Any,
    value: Any,
) -> None:
    """See `split_rotated` for what is not told here. A share has whole heads, so it can finish them."""
    rows, panels, dim = hidden.shape[0], weight.shape[0], query.shape[2]
    normed, qkv = np.empty_like(hidden), np.empty((rows, plus.shape[0]), np.float32)
    add_norm(hidden, hidden[:0], norm_weight, norm_eps, hidden, normed)
    taken = np.zeros(row_blocks(rows), np.int64)
    for _ in numba.prange(parts):
        for top, bottom, first, end in shares(taken, rows, panels, dim // PANEL, parts):
            more = plus[first * PANEL :].ctypes.data
            made = qkv[top:bottom]
            multiply_panels(normed[top:bottom], weight, first, end, more, 0, made, first * PANEL)
            for head in range(first * PANEL // dim, end * PANEL // dim):
                _finish_head(
                    made, head, query_weight, key_weight, head_eps, cos[top:bottom], sin[top:bottom],
                    query[top:bottom], key[top:bottom], value[top:bottom],
                )  # fmt: skip


@numba.njit  # type: ignore[untyped-decorator]
def _finish_head(
    qkv: Any,
    head: Any,
    query_weight: Any,
    key_weight: Any,
    eps: Any,
    cos: Any,
    sin: Any,
    query: Any,
    key: Any,
    value: Any,
) -> None:
    """Of all rows: turned into its place, or copied there."""
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[2]
    for t in range(qkv.shape[0]):
        row = qkv[t, head * dim : (head + 1) * dim]
        if head < heads:
            turn_head(row, query_weight, eps, cos[t], sin[t], query[t, head])
        elif head < heads + kv_heads:
            turn_head(row, key_weight, eps, cos[t], sin[t], key[t, head - heads])
        else:
            value[t, head - heads - kv_heads] = row


@numba.njit  # type: ignore[untyped-decorator]
def _added_product(
    x: Any,  # [M, K]
    weight: Any,  # [P, K, 8]
    plus: Any,  # [P * 16]
    first: Any,
    end: Any,  # panels
    before: Any,  # [M, P * 16]: added; may be `out`
    out: Any,  # [M, P * 16]
) -> None:
    for t in range(out.shape[0]):
        for n in range(first * PANEL, end * PANEL):
            out[t, n] = before[t, n] + plus[n]
    more = out.ctypes.data + first * PANEL * 4
    multiply_panels(x, weight, first, end, more, out.shape[1], out, first * PANEL)


@numba.njit(cache=True, parallel=True)  # type: ignore[untyped-decorator]
def _added_products(parts: int, x: Any, weight: Any, plus: Any, before: Any, out: Any) -> None:
    rows, panels = x.shape[0], weight.shape[0]
    taken = np.zeros(row_blocks(rows), np.int64)
    for _ in numba.prange(parts):
        for top, bottom, first, end in shares(taken, rows, panels, least_share(rows), parts):
            some, old, made = x[top:bottom], before[top:bottom], out[top:bottom]
            _added_product(some, weight, plus, first, end, old, made)


@numba.njit  # type: ignore[untyped-decorator]
def _gated_product(x: Any, weight: Any, plus: Any, first: Any, end: Any, out: Any) -> None:
    """Some panels of gates and of the ups to them, `weight` and `plus` being first all gates, then all ups."""
    panels, width = weight.shape[0] // 2, (end - first) * PANEL
    of_gates, of_ups = plus[first * PANEL :].ctypes.data, plus[(panels + first) * PANEL :].ctypes.data
    both = np.empty((x.shape[0], 2 * width), np.float32)
    multiply_panels(x, weight, first, end, of_gates, 0, both, 0)
    multiply_panels(x, weight, panels + first, panels + end, of_ups, 0, both, width)
    for t in range(x.shape[0]):
        gated_row(both[t, :width], both[t, width:], out[t, first * PANEL : end * PANEL])


@numba.njit(cache=True, parallel=True)  # type: ignore[untyped-decorator]
def _gated_products(parts: int, x: Any, weight: Any, plus: Any, out: Any) -> None:
    rows, panels = x.shape[0], weight.shape[0] // 2
    taken = np.zeros(row_blocks(rows), np.int64)
    for _ in numba.prange(parts):
        for top, bottom, first, end in shares(taken, rows, panels, least_share(rows), parts):
            _gated_product(x[top:bottom], weight, plus, first, end, out[top:bottom])


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _after(
    parts: int,
    hidden: Any,  # [T, C]
    attended: Any,  # [T, H * D]
    weight: Any,
    plus: Any,
    norm_weight: Any,
    norm_eps: Any,
    gates_weight: Any,
    gates_plus: Any,
    down_weight: Any,
    down_plus: Any,
    out: Any,  # [T, C]
) -> None:
    normed, inner = np.empty_like(hidden), np.empty((hidden.shape[0], down_weight.shape[1]), np.float32)
    _added_products(parts, attended, weight, plus, hidden, out)
    add_norm(out, out[:0], norm_weight, norm_eps, out, normed)
    _gated_products(parts, normed, gates_weight, gates_plus, inner)
    _added_products(parts, inner, down_weight, down_plus, out, out)
