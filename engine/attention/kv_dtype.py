"""How keys and values lie in the KV store: as plain numbers, or as int8 with a scale a token and head.

    float32, bfloat16, float16, fp8     x0 x1 ... x(D-1)
    int8                                q0 q1 ... q(D-1) (padding to 4 bytes) scale        x = q * scale

The scale is a float32 that lies behind the numbers it belongs to, so whoever counts, copies or moves blocks need not
know of it. fp8 is e4m3 (4 bits of exponent, 3 of mantissa, largest 448) without a scale; what is larger than a dtype
holds is stored as its largest.

What a row attends to is what is stored, its own key and value included: then neither the chunks of a prompt nor a
preemption changes an answer.
"""

from __future__ import annotations

import torch

from engine.attention.backend import Backend
from protocol import OptionRefused

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
INT8_LARGEST = 127
SCALE_BYTES = 4


def stored_dim(dim: int, dtype: torch.dtype) -> int:
    """Numbers of `dtype` that a vector of `dim` takes, its scale included."""
    return -(-dim // SCALE_BYTES) * SCALE_BYTES + SCALE_BYTES if dtype == torch.int8 else dim


def to_stored(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[..., D]` as they are stored: `[..., stored_dim(D)]` of `dtype`. Int8 is symmetric: scale = largest / 127."""
    if dtype == vectors.dtype:
        return vectors
    if dtype in (torch.float16, torch.float8_e4m3fn):
        largest = torch.finfo(dtype).max
        return vectors.float().clamp(-largest, largest).to(dtype)
    if dtype != torch.int8:
        return vectors.to(dtype)
    vectors = vectors.float()
    dim = vectors.shape[-1]
    scale = vectors.abs().amax(-1, keepdim=True) * (1 / INT8_LARGEST)
    numbers = vectors.div(torch.where(scale > 0, scale, 1.0)).round_().clamp_(-INT8_LARGEST, INT8_LARGEST)
    stored = torch.zeros(*vectors.shape[:-1], stored_dim(dim, dtype), dtype=dtype, device=vectors.device)
    stored[..., :dim] = numbers
    stored[..., -SCALE_BYTES:] = scale.view(torch.int8)
    return stored


def from_stored(stored: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The vectors `[..., dim]` of `[..., stored_dim(dim)]`, in `dtype`."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    scale = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :dim].float() * scale).to(dtype)


def choose_kv_dtype(asked: torch.dtype | None, compute: torch.dtype, backend: Backend) -> torch.dtype:
    """The dtype of a KV store.

    Args:
        asked: None: the model's.
        compute: dtype of queries, keys and values as the model makes them.

    Raises:
        OptionRefused: the backend cannot keep it beside `compute`.
    """
    can, dtype = backend.kv_dtypes(compute), asked or compute
    if dtype not in can:
        nearest = min(can, key=lambda other: abs(other.itemsize - dtype.itemsize))
        raise OptionRefused(
            f"kv_dtype {kv_dtype_name(dtype)} cannot be kept beside a model in {kv_dtype_name(compute)} by attention "
            f"backend {backend.name!r} (it can: {', '.join(map(kv_dtype_name, can))})",
            [{"kv_dtype": kv_dtype_name(nearest)}],
        )
    return dtype


def kv_dtype_name(dtype: torch.dtype) -> str:
    """The name `kv_dtype` has for a dtype."""
    return next((name for name, known in KV_DTYPES.items() if known == dtype), str(dtype))
