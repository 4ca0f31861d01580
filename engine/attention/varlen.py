"""The GPU backend: FlashAttention over pages as torch carries it, `torch.nn.attention.varlen.varlen_attn`.

    chunks       A: 1 row at 7     B: 4 rows at 0     C: 1 row at 2
    row_starts   0 1 5 6                  rows of A, B, C in the query [T, H, D]
    lengths      8 4 3                    keys that each has once this step's are written
    tables       [7 .] [2 .] [5 .]        their pages in [blocks, block_size, N, D]

One call serves decodes and prefill chunks alike; the causal mask ends at a sequence's last key, so a chunk's last row
sees all of it. What torch's kernels want differs (read in torch 2.13's sources and its tests of paged attention):

    FlashAttention 2, built in           pages of a multiple of 256 tokens; `cu_seq_k` given although pages are
    FlashAttention 3 and 4, if active    pages of any size; `cu_seq_k` refused beside pages

`num_splits` is 1 for both. FlashAttention 2 leaves rows unwritten where it splits the keys of a ragged batch (PyTorch
issue 194167, open in 2.13), and without splits a sequence's answer does not depend on its neighbours.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.backend import LayerCall
from engine.attention.batch import PackedBatch, to_device
from engine.attention.kv_layout import GPU_BLOCK_SIZE, KVLayout
from engine.attention.reference import ReferenceBackend, write_kv

log = logging.getLogger(__name__)

FLASH2_BLOCK_MULTIPLE = 256
LARGEST_HEAD = 256
HEAD_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class PagedStep:
    """What the kernel reads of a step of `S` sequences, all int32 on the device."""

    row_starts: torch.Tensor
    """`[S + 1]`: first row of each sequence, and one past the last."""
    key_starts: torch.Tensor
    """`[S + 1]`: the same of keys, as if they lay one after the other. FlashAttention 2 checks that it is there."""
    lengths: torch.Tensor
    """`[S]`: keys of each sequence."""
    tables: torch.Tensor
    """`[S, W]`: its blocks."""
    max_rows: int
    max_length: int

    @classmethod
    def of(cls, batch: PackedBatch) -> PagedStep:
        """Moved to the device in one piece."""
        count, width = batch.block_tables.shape
        host = np.zeros(2 * (count + 1) + count + count * width, np.int32)
        row_starts, key_starts, lengths, tables = _parts(host, count)
        lengths[:] = [span.length for span in batch.spans]
        row_starts[1:] = [span.end_row for span in batch.spans]
        np.cumsum(lengths, out=key_starts[1:])
        tables[:] = batch.block_tables.reshape(-1)
        row_starts, key_starts, lengths, tables = _parts(to_device(host, batch.input_ids.device), count)
        return cls(
            row_starts,
            key_starts,
            lengths,
            tables.view(count, width),
            max(span.num_rows for span in batch.spans),
            max(span.length for span in batch.spans),
        )


def _parts(packed: Any, count: int) -> tuple[Any, Any, Any, Any]:
    """Row starts, key starts, lengths and tables of one array or tensor."""
    starts = count + 1
    return (
        packed[:starts],
        packed[starts : 2 * starts],
        packed[2 * starts : 2 * starts + count],
        packed[2 * starts + count :],
    )


class VarlenBackend:
    """Paged FlashAttention; layers that it cannot compute (softcap, MLA's unequal heads) fall to the reference."""

    def __init__(self, attention: Callable[..., Any], active: str | None) -> None:
        """
        Args:
            attention: `varlen_attn`, or what stands for it.
            active: the FlashAttention that torch has been told to use, such as `FA3`; None: its own, version 2.
        """
        self.name = f"varlen ({active or 'FA2'})"
        multiple = 1 if active else FLASH2_BLOCK_MULTIPLE
        self.kv_layout = KVLayout(token_major=True, block_multiple=multiple, fewest_tokens=GPU_BLOCK_SIZE)
        self.replayable = True
        self._attention = attention
        self._wants_key_starts = active is None
        self._reference = ReferenceBackend()
        self._planned_reference: PackedBatch | None = None

    def kv_dtypes(self, compute: torch.dtype) -> Sequence[torch.dtype]:
        """See `Backend.kv_dtypes`: the kernels want keys in the query's dtype."""
        return (compute,)

    def plan(self, batch: PackedBatch) -> None:
        """See `Backend.plan`."""
        self.resume(batch, PagedStep.of(batch))

    def resume(self, batch: PackedBatch, step: PagedStep) -> None:
        """`plan` for a step whose numbers are on the device already."""
        self._batch, self._step = batch, step

    def attend(self, call: LayerCall) -> torch.Tensor:
        """See `Backend.attend`."""
        if call.softcap is not None or not fits(call.key.shape[-1], call.value.shape[-1]):
            return self._by_reference(call)
        batch, step = self._batch, self._step
        write_kv(call, None, batch.slot_blocks, batch.slot_offsets)
        found = self._attention(
            call.query,
            call.key_blocks.transpose(1, 2),
            call.value_blocks.transpose(1, 2),
            step.row_starts,
            step.key_starts if self._wants_key_starts else None,
            step.max_rows,
            step.max_length,
            return_aux=_with_normaliser() if call.sinks is not None else None,
            scale=call.scaling,
            window_size=_window(call.sliding_window, step.max_rows),
            enable_gqa=call.query.shape[1] != call.key.shape[1],
            seqused_k=step.lengths,
            block_table=step.tables,
            num_splits=1,
        )
        if call.sinks is None:
            out: torch.Tensor = found
            return out
        out, normaliser = found
        return _leave_to_sinks(out, normaliser, call.sinks)

    def _by_reference(self, call: LayerCall) -> torch.Tensor:
        """The reference reads lengths on the host, so a step with such a layer cannot be replayed."""
        self.replayable = False
        if self._planned_reference is not self._batch:
            self._reference.plan(self._batch)
            self._planned_reference = self._batch
        return self._reference.attend(call)


def fits(key_dim: int, value_dim: int) -> bool:
    """Whether the kernels take heads of these sizes."""
    return key_dim == value_dim and key_dim % HEAD_MULTIPLE == 0 and key_dim <= LARGEST_HEAD


def _window(window: int | None, max_rows: int) -> tuple[int, int]:
    """Keys before and after a row's own that it sees; -1: all.

    A lone row is its sequence's last, so all keys is what causal means for it. FlashAttention 2 then folds the query
    heads of a key-value head into one tile and reads its keys once; told (-1, 0) it reads them once a query head.
    """
    if window is not None:
        return window - 1, 0
    return (-1, -1) if max_rows == 1 else (-1, 0)


def _with_normaliser() -> Any:
    from torch.nn.attention.varlen import AuxRequest  # absent from older torch, whose backend is another

    return AuxRequest(lse=True)


def _leave_to_sinks(out: torch.Tensor, normaliser: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Take from `[T, H, D]` what the sinks draw.

    With L the logarithm of a row's sum of exponentials, `[H, T]`, a sink s makes the sum e^L + e^s:
    out * e^L / (e^L + e^s) = out * sigmoid(L - s).
    """
    share = torch.sigmoid(normaliser - sinks.float()[:, None])
    return (out * share.T[..., None]).to(out.dtype)


def find_varlen(device: torch.device, dtype: torch.dtype) -> VarlenBackend | None:
    """The backend for a GPU that has the kernels; None, and a line in the log that says why, for one that has not."""
    reason = _missing(device, dtype)
    if reason is not None:
        log.warning("attention in plain torch, which is slow: %s", reason)
        return None
    from torch.nn.attention import current_flash_attention_impl
    from torch.nn.attention.varlen import varlen_attn

    return VarlenBackend(varlen_attn, current_flash_attention_impl())


def _missing(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention computes in float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if torch.version.hip is not None or not torch.cuda.is_available():
        return "FlashAttention over pages needs an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"FlashAttention needs compute capability 8.0, this GPU has {major}.{minor}"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn; 2.12 has"
    if not {"block_table", "num_splits"} <= inspect.signature(varlen_attn).parameters.keys():
        return f"the varlen_attn of torch {torch.__version__} takes no block table; that of 2.12 does"
    return None
