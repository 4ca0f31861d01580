"""Attention over KV blocks: the hook into transformers, the packed batch, the backends."""

from __future__ import annotations

import torch

from engine.attention.backend import Backend, LayerCall
from engine.attention.batch import PackedBatch, Span, pack
from engine.attention.hook import (
    NAME,
    PagedAttention,
    Probe,
    ProbedLayer,
    Scores,
    attend_rows,
    logit_rows,
    probing,
)
from engine.attention.kv_layout import GPU_BLOCK_SIZE
from engine.attention.reference import ReferenceBackend
from engine.limits import BLOCK_SIZE


def choose_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The fastest backend for this device and dtype."""
    if device.type == "cuda":
        from engine.attention.varlen import find_varlen

        return find_varlen(device, dtype) or ReferenceBackend(GPU_BLOCK_SIZE)
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        from engine.attention.numba_cpu import NumbaBackend

        return NumbaBackend()
    return ReferenceBackend(BLOCK_SIZE if device.type == "cpu" else GPU_BLOCK_SIZE)


__all__ = [
    "NAME",
    "Backend",
    "LayerCall",
    "PackedBatch",
    "PagedAttention",
    "Probe",
    "ProbedLayer",
    "ReferenceBackend",
    "Scores",
    "Span",
    "attend_rows",
    "choose_backend",
    "logit_rows",
    "pack",
    "probing",
]
