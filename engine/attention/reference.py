"""Attention over blocks in plain torch: every feature, any device, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.backend import LayerCall
from engine.attention.batch import PackedBatch, Span
from engine.attention.kv_dtype import KV_DTYPES, from_stored, to_stored
from engine.attention.kv_layout import KVLayout
from engine.limits import BLOCK_SIZE


def write_kv(call: LayerCall, rows: torch.Tensor | None, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
    """Store the keys and values of `rows` (None: all) at their blocks and offsets."""
    key = call.key if rows is None else call.key[rows]
    value = call.value if rows is None else call.value[rows]
    for store, vectors in ((call.key_blocks, key), (call.value_blocks, value)):
        _bits(store)[blocks, :, offsets] = _bits(to_stored(vectors, store.dtype))


def attend_span(call: LayerCall, span: Span, table: torch.Tensor) -> torch.Tensor:
    """Attention of one sequence's rows over its blocks, query heads folded onto their key-value head.

    Args:
        table: `[blocks that hold the span's tokens]` int64, on the device.

    Returns:
        `[rows, H, E]`.
    """
    key, value, origin = past(call, span, table)
    length = span.length - origin

    query = call.query[span.first_row : span.end_row]
    rows, heads, head_dim = query.shape
    kv_heads = key.shape[0]
    group = heads // kv_heads
    # [rows, N*G, D] -> [N, G*rows, D]: one matmul a key-value head serves its whole group.
    folded = (
        query.view(rows, kv_heads, group, head_dim)
        .permute(1, 2, 0, 3)
        .reshape(kv_heads, group * rows, head_dim)
    )
    scores = torch.matmul(folded, key.transpose(1, 2)).view(kv_heads, group, rows, length)
    scores = scores.float().mul_(call.scaling)
    if call.softcap is not None:
        scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
    unseen = hidden(span, origin, call.sliding_window, query.device)
    if unseen is not None:
        scores.masked_fill_(unseen, float("-inf"))
    weights = _softmax(scores, call.sinks).to(value.dtype)
    out = torch.matmul(weights.view(kv_heads, group * rows, length), value)
    return out.view(kv_heads, group, rows, -1).permute(2, 0, 1, 3).reshape(rows, heads, -1)


def past(call: LayerCall, span: Span, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keys `[N, L, D]` and values `[N, L, E]` that a span's rows may look at, and the position of the first.

    Blocks that lie wholly before the first row's window are never read.
    """
    block_size = call.key_blocks.shape[2]
    first_seen = 0 if call.sliding_window is None else max(0, span.start - call.sliding_window + 1)
    skipped = first_seen // block_size
    length = span.length - skipped * block_size
    key, value = (
        from_stored(_gather(blocks, table[skipped:], length), vectors.shape[-1], vectors.dtype)
        for blocks, vectors in ((call.key_blocks, call.key), (call.value_blocks, call.value))
    )
    return key, value, skipped * block_size


def _gather(blocks: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """`[N, length, D]` from `[blocks, N, block_size, D]`."""
    found = _bits(blocks).index_select(0, table).view(blocks.dtype).transpose(0, 1)
    return found.reshape(found.shape[0], -1, found.shape[-1])[:, :length]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of fp8, which torch cannot index everywhere, its bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def hidden(span: Span, origin: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """`[rows, length]` bool, True where a row may not look; None where every row sees everything."""
    if span.num_rows == 1 and (window is None or span.length - origin <= window):
        return None
    rows = torch.arange(span.start, span.length, device=device)[:, None]
    columns = torch.arange(origin, span.length, device=device)[None]
    unseen = columns > rows
    return unseen if window is None else unseen | (columns <= rows - window)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last axis of `[N, G, rows, length]`, the sink's share left out."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    kv_heads, group, rows, _ = scores.shape
    sink = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, rows, 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]


class ReferenceBackend:
    """The backend that every other one is tested against, and falls back to."""

    name = "reference"

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        """
        Args:
            block_size: usual tokens of a block where it runs.
        """
        self.kv_layout = KVLayout(fewest_tokens=block_size)
        self._batch: PackedBatch | None = None
        self.tables: list[torch.Tensor] = []
        """Block table of each span of the step, int64, on the device."""

    def kv_dtypes(self, compute: torch.dtype) -> Sequence[torch.dtype]:  # noqa: ARG002
        """See `Backend.kv_dtypes`: all there are."""
        return tuple(KV_DTYPES.values())

    def plan(self, batch: PackedBatch) -> None:
        """Move the block tables to the device once for all layers."""
        self._batch = batch
        tables = torch.from_numpy(batch.block_tables).to(batch.input_ids.device, torch.int64)
        self.tables = list(tables.unbind(0))

    def attend(self, call: LayerCall) -> torch.Tensor:
        """See `Backend.attend`."""
        batch = self._batch
        assert batch is not None, "plan() comes before attend()"
        write_kv(call, None, batch.slot_blocks, batch.slot_offsets)
        out = call.query.new_empty(*call.query.shape[:2], call.value.shape[-1])
        for index in range(len(batch.spans)):
            self.attend_one(call, index, out)
        return out

    def attend_one(self, call: LayerCall, index: int, out: torch.Tensor) -> None:
        """Attention of the chunk at `index`, its keys and values already written, into its rows of `out`."""
        batch = self._batch
        assert batch is not None, "plan() comes before attend()"
        span = batch.spans[index]
        width = (span.length - 1) // call.key_blocks.shape[2] + 1
        out[span.first_row : span.end_row] = attend_span(call, span, self.tables[index][:width])
