"""Linear layers in int8 on a CPU: an option that gives up accuracy for speed (bench/NOTES.md has both), no default.

    weight   w[n, k] ~ wq[n, k] * ws[n]      int8, -63 .. 63, a scale an output, worked out at load
    input    x[m, k] ~ xq[m, k] * xs[m]      int8, -127 .. 127, a scale a row, worked out in each call
    output   y[m, n] = (sum over k of xq[m, k] * wq[n, k]) * ws[n] * xs[m]

A row's scale is its own and its sum one of integers, so it is the same alone and among others, bit for bit, whoever
computes it: oneDNN, or for a few rows, where that spends 0.2 ms a call whatever there is to do, a plain loop.

Seven bits for the weights: a processor without VNNI multiplies bytes by vpmaddubsw, which adds two products in 16
bits and cuts off what does not fit. 2 * 255 * 63 fits; with eight bits on both sides sums came out wrong.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.packed_linear import pack_linears
from engine.weights import Weights
from protocol import OptionRefused

log = logging.getLogger(__name__)

_WEIGHT_LARGEST = 63
_INPUT_LARGEST = 127
_ZERO = 128
"""The byte that stands for 0. oneDNN takes signed input too, in five times the time."""
_SMALLEST_SCALE = 1e-30
"""Of a row of zeros."""
_SHIFTER = 1.5 * 2**23
_FEW_ROWS = 3
_SMALLEST_SIDE = 32
"""Narrower layers (a router's) have little to gain, and a mistake of theirs costs most."""
_LEAST_SHARE = 0.5
"""Of the layers' weights. With less, answers change and next to nothing is won: of GPT-2, only the head is linear."""


class Int8Linear(nn.Module):
    """A linear layer that holds its weight as int8, plain and in oneDNN's layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.data.float()
        # Modules that ask for the weight's dtype or device get them; one that computes with it fails.
        self.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
        weight = linear.weight.data.float()
        self._scales = (weight.abs().amax(1) / _WEIGHT_LARGEST).clamp_min_(_SMALLEST_SCALE)
        self._numbers = weight.div(self._scales[:, None]).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(self._numbers, None)
        self._zeros = torch.zeros(self.out_features, dtype=torch.int32)

    @staticmethod
    def takes(linear: nn.Linear) -> bool:
        """Whether a layer is worth replacing, and can be here."""
        return (
            linear.weight.device.type == "cpu" and min(linear.weight.shape) >= _SMALLEST_SIDE and has_int8()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`, in the dtype of `x`."""
        rows = x.reshape(-1, self.in_features).float().contiguous()
        numbers = torch.empty(rows.shape, dtype=torch.uint8)
        scales = torch.empty(len(rows), 1)
        _quantize_rows(rows.numpy(), rows.view(torch.int32).numpy(), numbers.numpy(), scales.numpy())
        out = self._few(numbers, scales) if len(rows) <= _FEW_ROWS else self._many(numbers, scales)
        if self.bias is not None:
            out.add_(self.bias)
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def _few(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(numbers), self.out_features)
        _multiply_few(
            numbers.numpy(),
            scales.numpy(),
            self._numbers.numpy(),
            self._scales.numpy(),
            out.numpy(),
            torch.get_num_threads(),
        )
        return out

    def _many(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        # x_scale, x_zero_point, ..., bias, output_scale, output_zero_point, output_dtype, what follows the product
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            numbers,
            1.0,
            _ZERO,
            self._packed,
            self._scales,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return out.mul_(scales)


def with_int8_linears(weights: Weights, run: Callable[[], Any]) -> Weights:
    """The weights, their linear layers replaced by int8 ones, and so called.

    Args:
        run: see `pack_linears`.

    Raises:
        OptionRefused: this is no CPU that has them, or most of the layers' weights would stay as they are.
    """
    device, name = weights.model.device, weights.fingerprint.name
    if device.type != "cpu" or not has_int8():
        raise OptionRefused(
            f"quantization int8 is computed by oneDNN on a CPU, not on {device}", [{"quantization": None}]
        )
    linears = sum(type(module) is nn.Linear for module in weights.model.modules())
    before = _layer_weights(weights.model)
    replaced = pack_linears(weights.model, run, Int8Linear)
    modules = dict(weights.model.named_modules())
    left = {part: one for part, one in before.items() if not isinstance(modules[part], Int8Linear)}
    total = sum(count for _, count in before.values())
    share = 1 - sum(count for _, count in left.values()) / total if total else 0.0
    told = (
        f"{replaced} of {linears} linear layers, {math.floor(100 * share)} % of the layers' weights without "
        f"embeddings and head ({_kinds(left)})"
    )
    if share < _LEAST_SHARE:
        raise OptionRefused(
            f"quantization int8 can replace too little of {name!r}: {told}", [{"quantization": None}]
        )
    log.info("int8: %s", told)
    method = ", ".join(part for part in (weights.fingerprint.quantization, "int8") if part)
    return replace(weights, fingerprint=weights.fingerprint.model_copy(update={"quantization": method}))


def _layer_weights(model: PreTrainedModel) -> dict[str, tuple[str, int]]:
    """Kind and number of weights of every module that has matrices of its own; embeddings and the head left out."""
    head = model.get_output_embeddings()
    found = {}
    for name, module in model.named_modules():
        count = sum(weight.numel() for weight in module.parameters(recurse=False) if weight.dim() > 1)
        if count and module is not head and not isinstance(module, nn.Embedding):
            found[name] = type(module).__name__, count
    return found


def _kinds(left: dict[str, tuple[str, int]]) -> str:
    """What stays as it is, by kind."""
    kinds = Counter("narrow Linear" if kind == "Linear" else kind for kind, _ in left.values())
    stays = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"as they were: {stays}" if stays else "all"


def has_int8() -> bool:
    """Whether this torch has oneDNN's int8 layers."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.onednn, "qlinear_pointwise")


@numba.njit(cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _quantize_rows(rows: Any, bits: Any, numbers: Any, scales: Any) -> None:
    """`[M, K]` float32, and its bits as int32, to bytes around 128 and the scale of each row.

    Five torch operations took 115 us for 32 rows of 576. Of a row that is not finite, no output is.
    """
    for m in range(rows.shape[0]):
        largest = np.int32(0)  # as bits, which sort as sizes do, a NaN last
        for k in range(rows.shape[1]):
            largest = max(largest, np.int32(bits[m, k] & np.int32(0x7FFFFFFF)))
        scale = np.int32(largest).view(np.float32) * np.float32(1 / _INPUT_LARGEST)
        if scale < np.float32(_SMALLEST_SCALE):
            scale = np.float32(_SMALLEST_SCALE)
        for k in range(rows.shape[1]):
            # The sum's last bits are the nearest whole number, ties to even: no call of rint(), so it is vectorized.
            rounded = np.float32(rows[m, k] / scale + np.float32(_SHIFTER)).view(np.int32)
            numbers[m, k] = np.uint8((rounded + np.int32(_ZERO)) & np.int32(0xFF))
        scales[m, 0] = scale


@numba.njit(cache=True, parallel=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _multiply_few(
    numbers: Any,  # [M, K] bytes around 128
    scales: Any,  # [M, 1]
    weight: Any,  # [N, K] int8
    weight_scales: Any,  # [N]
    out: Any,  # [M, N]
    parts: int,
) -> None:
    outputs = weight.shape[0]
    for part in numba.prange(parts):
        wide = np.empty(numbers.shape, np.int16)
        for m in range(numbers.shape[0]):
            for k in range(numbers.shape[1]):
                wide[m, k] = np.int16(numbers[m, k]) - np.int16(_ZERO)
        for n in range(outputs * part // parts, outputs * (part + 1) // parts):
            for m in range(numbers.shape[0]):
                total = np.int32(0)
                for k in range(weight.shape[1]):
                    total += np.int32(wide[m, k]) * np.int32(weight[n, k])
                out[m, n] = np.float32(total) * weight_scales[n] * scales[m, 0]
