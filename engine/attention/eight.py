"""Eight float32 numbers at once inside a Numba kernel, as one value.

    a = load(keys, 8)       [k8 k9 k10 ... k15]        from float32, bfloat16, float16, fp8 or int8
    b = splat(x)            [x  x  x   ... x  ]
    c = add(a, b)                                      one AVX instruction; two or four where registers are narrower

Numba has no such type, and makes vectors of plain loops only where it can prove that arrays do not overlap, so the
sums of a hand-written loop stay in memory. Here the type is LLVM's own <8 x float>, which every target has.
Offsets count numbers of a one-dimensional C-ordered array, are not checked, and need no alignment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from engine.attention.numba_numbers import SMALL_FLOATS

_FLOATS = ir.VectorType(ir.FloatType(), 8)
_INTS = ir.VectorType(ir.IntType(32), 8)
_FAST = ("reassoc", "contract", "nsz", "arcp")


class _Eight(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="Eight")


_eight = _Eight()


@register_model(_Eight)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


def _ints(numbers: Any) -> Any:
    return ir.Constant(_INTS, list(numbers))


def _floats(number: float) -> Any:
    return ir.Constant(_FLOATS, [float(np.float32(number))] * 8)


def _spread(builder: Any, number: Any) -> Any:
    """A scalar in all eight places."""
    empty = ir.Constant(ir.VectorType(number.type, 8), ir.Undefined)
    first = builder.insert_element(empty, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, empty, _ints([0] * 8))


def _address(context: Any, builder: Any, signature: Any, args: Any, at: int = 0) -> Any:
    """Where number `args[at + 1]` of the array `args[at]` lies."""
    array = context.make_array(signature.args[at])(context, builder, args[at])
    offset = context.cast(builder, args[at + 1], signature.args[at + 1], types.intp)
    return builder.gep(array.data, [offset])


@intrinsic  # type: ignore[untyped-decorator]
def load(_: Any, array: Any, offset: Any) -> Any:
    """Numbers `offset` to `offset + 7`, widened to float32; int8 without its scale."""
    widened = _WIDENED[array.dtype]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature, args)
        kind = ir.VectorType(address.type.pointee, 8)
        return widened(builder, builder.load(builder.bitcast(address, kind.as_pointer()), align=1))

    return _eight(array, offset), generate


def _same(_: Any, numbers: Any) -> Any:
    return numbers


def _from_bfloat16(builder: Any, numbers: Any) -> Any:
    moved = builder.shl(builder.zext(numbers, _INTS), _ints([16] * 8))
    return builder.bitcast(moved, _FLOATS)


def _from_int8(builder: Any, numbers: Any) -> Any:
    return builder.sitofp(builder.sext(numbers, _INTS), _FLOATS)


def _from_small_float(sign_shift: int, mantissa: int, bias: int, special: int) -> Callable[[Any, Any], Any]:
    """A float whose sign bit stands `sign_shift` below a float32's; patterns from `special` on are no numbers."""

    def widened(builder: Any, numbers: Any) -> Any:
        whole = builder.zext(numbers, _INTS)
        magnitude = builder.and_(whole, _ints([(1 << 31 - sign_shift) - 1] * 8))
        sign = builder.shl(builder.xor(whole, magnitude), _ints([sign_shift] * 8))
        moved = builder.or_(builder.shl(magnitude, _ints([23 - mantissa] * 8)), sign)
        # Right for subnormal numbers too.
        number = builder.fmul(builder.bitcast(moved, _FLOATS), _floats(2.0 ** (127 - bias)))
        is_special = builder.icmp_signed(">=", magnitude, _ints([special] * 8))
        return builder.select(is_special, _floats(np.nan), number)

    return widened


_WIDENED = {
    types.float32: _same,
    types.uint16: _from_bfloat16,
    types.int16: _from_small_float(16, *SMALL_FLOATS["float16"]),
    types.uint8: _from_small_float(24, *SMALL_FLOATS["fp8"]),
    types.int8: _from_int8,
}


@intrinsic  # type: ignore[untyped-decorator]
def put(_: Any, array: Any, offset: Any, eight: Any) -> Any:
    """Write to numbers `offset` to `offset + 7` of an array of float32 or bfloat16, which rounds to nearest even."""
    narrowed = {types.float32: _same, types.uint16: _to_bfloat16}[array.dtype]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, numbers = _address(context, builder, signature, args), narrowed(builder, args[2])
        builder.store(numbers, builder.bitcast(address, numbers.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.none(array, offset, eight), generate


def _to_bfloat16(builder: Any, numbers: Any) -> Any:
    whole = builder.bitcast(numbers, _INTS)
    lowest_kept = builder.and_(builder.lshr(whole, _ints([16] * 8)), _ints([1] * 8))
    rounded = builder.add(whole, builder.add(lowest_kept, _ints([0x7FFF] * 8)))
    return builder.trunc(builder.lshr(rounded, _ints([16] * 8)), ir.VectorType(ir.IntType(16), 8))


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_: Any, array: Any, offset: Any) -> Any:
    """Ask for the cache line of number `offset`, without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        address = builder.bitcast(_address(context, builder, signature, args), pointer)
        builder.call(function, [address, *(ir.Constant(i32, code) for code in (0, 3, 1))])  # read, L1, data
        return context.get_dummy_value()

    return types.none(array, offset), generate


@intrinsic  # type: ignore[untyped-decorator]
def splat(_: Any, number: Any) -> Any:  # noqa: ARG001
    """The number eight times, as float32."""

    return _eight(types.float32), lambda _, builder, __, args: _spread(builder, args[0])


@intrinsic  # type: ignore[untyped-decorator]
def add(_: Any, a: Any, b: Any) -> Any:
    """Sums, place by place; these four leave the compiler free to order and fuse."""
    return _eight(a, b), lambda _, builder, __, args: builder.fadd(*args, flags=_FAST)


@intrinsic  # type: ignore[untyped-decorator]
def subtract(_: Any, a: Any, b: Any) -> Any:
    """Differences."""
    return _eight(a, b), lambda _, builder, __, args: builder.fsub(*args, flags=_FAST)


@intrinsic  # type: ignore[untyped-decorator]
def multiply(_: Any, a: Any, b: Any) -> Any:
    """Products."""
    return _eight(a, b), lambda _, builder, __, args: builder.fmul(*args, flags=_FAST)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic  # type: ignore[untyped-decorator]
def larger(_: Any, a: Any, b: Any) -> Any:
    """The larger of each two; b where one of them is no number."""
    return _eight(a, b), lambda _, builder, __, args: _larger(builder, *args)


def _folded(builder: Any, eight: Any, join: Callable[[Any, Any, Any], Any]) -> Any:
    """One number made of all eight: halves, quarters, neighbours."""
    for distance in (4, 2, 1):
        other = builder.shuffle_vector(eight, eight, _ints((i + distance) % 8 for i in range(8)))
        eight = join(builder, eight, other)
    return builder.extract_element(eight, ir.Constant(ir.IntType(32), 0))


@intrinsic  # type: ignore[untyped-decorator]
def highest_of(_: Any, eight: Any) -> Any:
    """The largest of the eight."""
    return types.float32(eight), lambda _, builder, __, args: _folded(builder, args[0], _larger)


@intrinsic  # type: ignore[untyped-decorator]
def sum_of(_: Any, eight: Any) -> Any:
    """The sum of the eight."""

    def join(builder: Any, a: Any, b: Any) -> Any:
        return builder.fadd(a, b, flags=_FAST)

    return types.float32(eight), lambda _, builder, __, args: _folded(builder, args[0], join)


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, fused where the processor can: asked for by name, one that cannot would call a function."""
    return builder.fadd(builder.fmul(a, b, flags=_FAST), c, flags=_FAST)


def _read(builder: Any, start: Any, offset: Any) -> Any:
    return builder.load(builder.bitcast(builder.gep(start, [offset]), _FLOATS.as_pointer()), align=4)


def _sums_of_each(builder: Any, rows: list[Any]) -> Any:
    """The sum of each of eight: seven additions of interleaved halves in place of eight times three."""
    for first, second in (
        ((0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15)),
        ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)),
        ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),
    ):
        rows = [
            builder.fadd(
                builder.shuffle_vector(one, other, _ints(first)),
                builder.shuffle_vector(one, other, _ints(second)),
                flags=_FAST,
            )
            for one, other in zip(rows[::2], rows[1::2], strict=True)
        ]
    return rows[0]


@intrinsic  # type: ignore[untyped-decorator]
def products_with_eight(_: Any, one: Any, a: Any, many: Any, b: Any, dim: Any) -> Any:  # noqa: ARG001
    """The products of `dim` numbers at `one[a]` with those at `many[b]`, `many[b + dim]` ... `many[b + 7 * dim]`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = _address(context, builder, signature, args)
        second = _address(context, builder, signature, args, 2)
        sums = [cgutils.alloca_once_value(builder, _floats(0)) for _ in range(8)]
        zero, eight = (ir.Constant(args[4].type, number) for number in (0, 8))
        with cgutils.for_range_slice(builder, zero, args[4], eight, inc=True) as (d, _):
            numbers, place = _read(builder, first, d), d
            for total in sums:
                builder.store(
                    _fused(builder, numbers, _read(builder, second, place), builder.load(total)), total
                )
                place = builder.add(place, args[4])
        return _sums_of_each(builder, [builder.load(total) for total in sums])

    return _eight(one, a, many, b, types.intp), generate


def _add_columns(
    builder: Any, width: int, sums: Any, many: Any, scale: Any, weights: Any, count: Any, dim: Any
) -> None:
    """The same of `8 * width` numbers: they stay in registers over all vectors."""
    places = [ir.Constant(dim.type, 8 * i) for i in range(width)]
    kept = [
        cgutils.alloca_once_value(builder, builder.fmul(_read(builder, sums, at), scale, flags=_FAST))
        for at in places
    ]
    with cgutils.for_range(builder, count) as loop:
        weight = _spread(builder, builder.load(builder.gep(weights, [loop.index])))
        row = builder.gep(many, [builder.mul(loop.index, dim)])
        for total, at in zip(kept, places, strict=True):
            builder.store(_fused(builder, weight, _read(builder, row, at), builder.load(total)), total)
    for total, at in zip(kept, places, strict=True):
        place = builder.bitcast(builder.gep(sums, [at]), _FLOATS.as_pointer())
        builder.store(builder.load(total), place, align=4)


@intrinsic  # type: ignore[untyped-decorator]
def add_weighted(
    _: Any,
    sums: Any,
    a: Any,
    scale: Any,  # noqa: ARG001
    many: Any,
    b: Any,
    weights: Any,
    w: Any,
    count: Any,  # noqa: ARG001
    dim: Any,  # noqa: ARG001
) -> Any:
    """Scale `dim` numbers at `sums[a]`; add `count` vectors from `many[b]` on, weighed by `weights[w]` and so on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = _address(context, builder, signature, args)
        second = _address(context, builder, signature, args, 3)
        weight = _address(context, builder, signature, args, 5)
        scale, count, dim = _spread(builder, args[2]), args[7], args[8]
        place = ir.Constant(dim.type, 0)
        # As many sums at once as registers hold, then fewer.
        for width in (8, 4, 2, 1):
            step = ir.Constant(dim.type, 8 * width)
            end = builder.sub(dim, builder.srem(builder.sub(dim, place), step))
            with cgutils.for_range_slice(builder, place, end, step, inc=True) as (d, _):
                column, others = builder.gep(first, [d]), builder.gep(second, [d])
                _add_columns(builder, width, column, others, scale, weight, count, dim)
            place = end
        return context.get_dummy_value()

    return types.none(sums, a, types.float32, many, b, weights, w, types.intp, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def shown(_: Any, eight: Any, first: Any, begin: Any, end: Any) -> Any:
    """What stands at `begin <= first + place < end`; -inf elsewhere, whatever stood there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, begin, end = (
            _spread(builder, context.cast(builder, number, kind, types.int32))
            for number, kind in zip(args[1:], signature.args[1:], strict=True)
        )
        place = builder.add(first, _ints(range(8)))
        inside = builder.and_(builder.icmp_signed(">=", place, begin), builder.icmp_signed("<", place, end))
        return builder.select(inside, args[0], _floats(-np.inf))

    return _eight(eight, first, begin, end), generate


@intrinsic  # type: ignore[untyped-decorator]
def exp(_: Any, eight: Any) -> Any:
    """e**x for x <= 0 within 2 ulp, 0 below -87: 2**n by the exponent bits, and a polynomial (Cephes, expf)."""

    def generate(_: Any, builder: Any, __: Any, args: Any) -> Any:
        def product(a: Any, b: Any) -> Any:
            return builder.fmul(a, b, flags=_FAST)

        def total(a: Any, b: Any) -> Any:
            return builder.fadd(a, b, flags=_FAST)

        kind = ir.FunctionType(_FLOATS, [_FLOATS])
        floor = cgutils.get_or_insert_function(builder.module, kind, "llvm.floor.v8f32")
        vanishes = builder.fcmp_ordered("<", args[0], _floats(-87.0))
        x = builder.select(vanishes, _floats(-87.0), args[0])
        n = builder.call(floor, [total(product(x, _floats(1.44269504)), _floats(0.5))])
        r = total(x, product(n, _floats(-0.693359375)))
        r = total(r, product(n, _floats(2.12194440e-4)))
        p = _floats(1.9875691500e-4)
        for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = total(product(p, r), _floats(term))
        p = total(total(product(p, product(r, r)), r), _floats(1.0))
        power = builder.shl(builder.add(builder.fptosi(n, _INTS), _ints([127] * 8)), _ints([23] * 8))
        return builder.select(vanishes, _floats(0.0), product(p, builder.bitcast(power, _FLOATS)))

    return _eight(eight), generate
