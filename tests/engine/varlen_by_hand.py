"""`torch.nn.attention.varlen.varlen_attn` in plain torch, and as strict as its kernels about what it is given.

It reads nothing but its tensors, so a recorded step that runs it again follows what the buffers hold by then.
"""

from __future__ import annotations

from typing import Any

import torch


def varlen_by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Pages only. Query `[T, H, D]`, key and value `[blocks, block_size, N, D]`; the normaliser is `[H, T]`."""
    assert seqused_k is not None
    assert block_table is not None
    heads, kv_heads = query.shape[1], key.shape[2]
    count = len(seqused_k)
    assert num_splits == 1, "more splits leave rows unwritten"
    assert enable_gqa or heads == kv_heads
    if cu_seq_k is not None:
        assert cu_seq_k.dtype == torch.int32
        assert torch.equal(cu_seq_k, torch.cat([cu_seq_k.new_zeros(1), seqused_k.cumsum(0)]))
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert cu_seq_q.shape == (count + 1,)
    assert block_table.shape[0] == count
    assert block_table.stride(-1) == query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    rows_of, lengths = cu_seq_q.diff(), seqused_k
    assert int(rows_of.max()) <= max_q
    assert int(lengths.max()) <= max_k
    assert int(cu_seq_q[-1]) == len(query)

    left, right = window_size
    out, normaliser = torch.empty_like(query), query.new_empty(heads, len(query), dtype=torch.float32)
    for sequence in range(count):
        length, rows = int(lengths[sequence]), slice(int(cu_seq_q[sequence]), int(cu_seq_q[sequence + 1]))
        pages = block_table[sequence, : -(-length // key.shape[1])].long()
        keys, values = (
            part[pages].flatten(0, 1)[:length].repeat_interleave(heads // kv_heads, 1).double()
            for part in (key, value)
        )
        scores = torch.einsum("rhd,khd->hrk", query[rows].double(), keys) * (scale or query.shape[-1] ** -0.5)
        at = torch.arange(length - scores.shape[1], length)[:, None]
        seen = torch.arange(length)[None]
        hidden = torch.zeros(scores.shape[1:], dtype=torch.bool)
        if left >= 0:
            hidden |= seen < at - left
        if right >= 0:
            hidden |= seen > at + right
        scores = scores.masked_fill(hidden, -torch.inf)
        out[rows] = torch.einsum("hrk,khd->rhd", scores.softmax(-1), values).to(out.dtype)
        normaliser[:, rows] = scores.logsumexp(-1).float()
    return (out, normaliser) if return_aux is not None and return_aux.lse else out
