"""The innermost loop of a matrix product, in LLVM's instructions: what is to stay in registers no Python can say.

    out[r, n] = sum over k of x[r, k] * w[n, k], plus[r, n] added at last         R rows, P panels of 16 outputs

    one k    a panel's 8 words of two bfloat16 numbers --> 2 vectors of 8 float32: word << 16, word & 0xFFFF0000
             or its 16 float32                         --> 2 vectors of 8
             one number of each row                    --> a vector of 8 times that number
             R * P * 2 vectors of sums                     sum += x * w

Six rows by one panel fill the 16 registers of AVX2: 12 sums, 2 weights, a number of x, the mask. Numba would keep
sums in memory. A sum goes over k in order, whatever R and P are, so a row's outputs are the same in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

PANEL = 16
"""Outputs of a panel."""

_LANES = PANEL // 2
_INT, _FLOAT = ir.IntType(64), ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(ir.IntType(32), _LANES), ir.VectorType(_FLOAT, _LANES)


@dataclass(frozen=True, slots=True)
class PanelKind:
    """How a panel's weights lie in memory."""

    bytes: int
    """Of a panel at one k."""
    load: Callable[[Any, Any], tuple[Any, Any]]
    """Of an instruction builder and an address: outputs 0 to 7 and 8 to 15, as float32."""


def register_tile(rows: int, panels: int, kind: PanelKind) -> Any:
    """A function of a kernel that computes `rows` rows of `panels` panels.

    It takes the address of the rows and how many numbers lie from one to the next, the address of the panels and how
    many bytes, the length of k (at least 1), and as for the rows those of `plus` (may be `out`) and of `out`; last
    an address and how many bytes it moves with each k: what lies there is brought into the cache.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        _typing: Any,
        _x: Any,
        _x_step: Any,
        _w: Any,
        _w_step: Any,
        _length: Any,
        _plus: Any,
        _plus_step: Any,
        _out: Any,
        _out_step: Any,
        _ahead: Any,
        _ahead_step: Any,
    ) -> Any:
        return types.void(*[types.intp] * 11), _generate

    def _generate(context: Any, build: Any, _signature: Any, arguments: Any) -> Any:
        x, x_step, w, w_step, length, plus, plus_step, out, out_step, ahead, ahead_step = arguments
        places = list(product(range(rows), range(2 * panels)))
        lines = [build.add(x, build.mul(x_step, _INT(4 * row))) for row in range(rows)]
        words = [build.add(w, build.mul(w_step, _INT(panel))) for panel in range(panels)]
        before = build.block
        loop, end = build.append_basic_block("tile"), build.append_basic_block("tile.end")
        build.branch(loop)
        build.position_at_end(loop)
        k = build.phi(_INT)
        sums = [build.phi(_FLOATS) for _ in places]
        _fetch(build, build.add(ahead, build.mul(k, ahead_step)))
        places_at_k = [build.add(word, build.mul(k, _INT(kind.bytes))) for word in words]
        weights = [half for place in places_at_k for half in kind.load(build, place)]
        numbers = [_copies(build, line, k) for line in lines]
        pairs = [(number, weight) for number in numbers for weight in weights]
        added = [_add_product(build, sum_, *pair) for sum_, pair in zip(sums, pairs, strict=True)]
        next_k = build.add(k, _INT(1))
        k.add_incoming(_INT(0), before)
        k.add_incoming(next_k, loop)
        for sum_, new in zip(sums, added, strict=True):
            sum_.add_incoming(ir.Constant(_FLOATS, [0.0] * _LANES), before)
            sum_.add_incoming(new, loop)
        build.cbranch(build.icmp_signed("<", next_k, length), loop, end)
        build.position_at_end(end)
        for place, new in zip(places, added, strict=True):
            more = build.load(_sums(build, plus, plus_step, *place), align=4)
            build.store(build.fadd(new, more), _sums(build, out, out_step, *place), align=4)
        return context.get_dummy_value()

    return tile


@intrinsic  # type: ignore[untyped-decorator]
def stay_apart(_typing: Any) -> Any:
    """Keeps the function that calls it from being copied into its callers, which would take seconds to compile."""

    def generate(context: Any, build: Any, _signature: Any, _arguments: Any) -> Any:
        build.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


def _pointer(build: Any, address: Any, kind: Any) -> Any:
    return build.inttoptr(address, kind.as_pointer())


def _sums(build: Any, address: Any, step: Any, row: int, half: int) -> Any:
    """Where 8 outputs of a row lie, half a panel."""
    at = build.add(build.mul(step, _INT(4 * row)), _INT(4 * _LANES * half))
    return _pointer(build, build.add(address, at), _FLOATS)


def _fetch(build: Any, address: Any) -> None:
    """Bring what will be read soon into all caches (for reading: 0, to keep: 3, data: 1)."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    prefetch = cgutils.get_or_insert_function(build.module, kind, "llvm.prefetch.p0")
    build.call(prefetch, [build.inttoptr(address, byte), word(0), word(3), word(1)])


def _halves(build: Any, address: Any) -> tuple[Any, Any]:
    words = build.load(_pointer(build, address, _WORDS), align=4)
    low = build.shl(words, ir.Constant(_WORDS, [16] * _LANES))
    high = build.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * _LANES))
    return build.bitcast(low, _FLOATS), build.bitcast(high, _FLOATS)


def _whole(build: Any, address: Any) -> tuple[Any, Any]:
    second = build.add(address, _INT(4 * _LANES))
    return tuple(build.load(_pointer(build, half, _FLOATS), align=4) for half in (address, second))


UPPER_HALVES, WHOLE = PanelKind(32, _halves), PanelKind(64, _whole)


def _copies(build: Any, row: Any, k: Any) -> Any:
    """A row's number at one k, in each place of a vector."""
    number = build.load(_pointer(build, build.add(row, build.mul(k, _INT(4))), _FLOAT), align=4)
    empty = ir.Constant(_FLOATS, ir.Undefined)
    first = build.insert_element(empty, number, ir.IntType(32)(0))
    return build.shuffle_vector(first, empty, ir.Constant(_WORDS, [0] * _LANES))


def _add_product(build: Any, sum_: Any, number: Any, weight: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    fused = cgutils.get_or_insert_function(build.module, kind, f"llvm.fmuladd.v{_LANES}f32")
    return build.call(fused, [number, weight, sum_])
