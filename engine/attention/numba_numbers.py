"""Numbers that numpy does not know, read and written inside a Numba kernel.

    torch        numpy     read (`eight.load`)                  written
    float32      float32   as it is
    bfloat16     uint16    upper half of a float32              rounded to nearest even
    float16      int16     bits moved, times 2**112             the same, subnormal numbers too
    fp8 (e4m3)   uint8     bits moved, times 2**120             the same
    int8         int8      times its vector's scale             scale = largest / 127

The kernel tells them apart by type, so each pair of dtypes is compiled by itself. What is written equals what
`kv_dtype.to_stored` makes, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba import types
from numba.extending import overload

_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float8_e4m3fn: torch.uint8}

SMALL_FLOATS = {"float16": (10, 15, 0x7C00), "fp8": (3, 7, 0x7F)}
"""Bits of the mantissa, bias of the exponent, first pattern that is not finite."""
_HALF = (*SMALL_FLOATS["float16"][:2], np.float32(65504))
_FP8 = (*SMALL_FLOATS["fp8"][:2], np.float32(448))

_INVERSE_LARGEST = np.float32(1 / 127)
_exact = numba.njit(fastmath=False, error_model="numpy")
"""For what must round as torch does: a function without flags of its own takes its caller's."""


def bits(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """The tensor's memory as the kernel takes it."""
    kind = _BITS.get(tensor.dtype)
    array: npt.NDArray[np.generic] = (tensor if kind is None else tensor.view(kind)).numpy()
    return array


def scales(blocks: torch.Tensor) -> npt.NDArray[np.float32] | None:
    """The memory of int8 blocks as float32: the last of each vector is its scale. None: they have no scales."""
    if blocks.dtype != torch.int8:
        return None
    array: npt.NDArray[np.float32] = blocks.view(torch.float32).numpy()
    return array


@_exact  # type: ignore[untyped-decorator]
def _narrowed(number: Any, sign_shift: Any, mantissa: Any, bias: Any, largest: Any) -> Any:
    """The bits of the small float nearest to a float32, ties to even, too large ones to the largest."""
    all_bits = np.float32(number).view(np.uint32)
    sign = (all_bits >> np.uint32(31)) << np.uint32(31 - sign_shift)
    magnitude = min(abs(np.float32(number)), largest)
    if number != number:
        return sign | ((np.uint32(1) << np.uint32(31 - sign_shift)) - np.uint32(1))
    if magnitude < np.float32(2.0 ** (1 - bias)):  # subnormal: a multiple of the smallest
        return sign | np.uint32(np.rint(magnitude * np.float32(2.0 ** (mantissa + bias - 1))))
    shift = np.uint32(23 - mantissa)
    kept = np.float32(magnitude).view(np.uint32)
    kept += (np.uint32(1) << (shift - np.uint32(1))) - np.uint32(1) + ((kept >> shift) & np.uint32(1))
    return sign | ((kept >> shift) - np.uint32((127 - bias) << mantissa))


def as_float32(number: Any) -> Any:
    """A model's number as float32."""
    raise NotImplementedError


@overload(as_float32)  # type: ignore[untyped-decorator]
def _as_float32(number: Any) -> Any:
    def same(number: Any) -> Any:
        return number

    def bfloat16(number: Any) -> Any:
        return np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)

    return {types.float32: same, types.uint16: bfloat16}[number]


def from_float32(number: Any, like: Any) -> Any:
    """A float32 in the dtype of `like`, which is no int8."""
    raise NotImplementedError


@overload(from_float32)  # type: ignore[untyped-decorator]
def _from_float32(number: Any, like: Any) -> Any:  # noqa: ARG001
    def same(number: Any, like: Any) -> Any:  # noqa: ARG001
        return number

    def bfloat16(number: Any, like: Any) -> Any:  # noqa: ARG001
        bits = np.float32(number).view(np.uint32)
        return np.uint16(
            (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        )

    def float16(number: Any, like: Any) -> Any:  # noqa: ARG001
        return np.int16(_narrowed(number, 16, _HALF[0], _HALF[1], _HALF[2]))

    def fp8(number: Any, like: Any) -> Any:  # noqa: ARG001
        return np.uint8(_narrowed(number, 24, _FP8[0], _FP8[1], _FP8[2]))

    return {types.float32: same, types.uint16: bfloat16, types.int16: float16, types.uint8: fp8}[like]


def store(blocks: Any, scales: Any, place: Any, vector: Any) -> None:
    """Write a vector at `place`, that is (block, head, offset), with its scale where the blocks have some."""
    raise NotImplementedError


@overload(store)  # type: ignore[untyped-decorator]
def _store(blocks: Any, scales: Any, place: Any, vector: Any) -> Any:  # noqa: ARG001
    def plain(blocks: Any, scales: Any, place: Any, vector: Any) -> None:  # noqa: ARG001
        stored = blocks[place]
        for d in range(vector.shape[0]):
            stored[d] = from_float32(as_float32(vector[d]), stored[d])

    def scaled(blocks: Any, scales: Any, place: Any, vector: Any) -> None:
        scales[place][-1] = _quantize(vector, blocks[place])

    return plain if scales in (None, types.none) else scaled


@_exact  # type: ignore[untyped-decorator]
def _quantize(vector: Any, numbers: Any) -> Any:
    """Fill the int8 numbers of a vector; returns its scale."""
    largest = np.float32(0)
    for d in range(vector.shape[0]):
        size = abs(as_float32(vector[d]))
        if size > largest or size != size:  # a NaN stays: nothing is larger
            largest = size
    scale = largest * _INVERSE_LARGEST
    divisor = scale if scale > 0 else np.float32(1)
    for d in range(vector.shape[0]):
        number = np.rint(as_float32(vector[d]) / divisor)
        numbers[d] = np.int8(max(np.float32(-127), min(np.float32(127), number)))
    return scale
