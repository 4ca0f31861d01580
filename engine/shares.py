"""Work that threads take in shares as they come free, in place of equal parts made beforehand.

    36 by two threads    9 | 6 | 5 | 4 | 3 | 2 | 1 1 1 1 1 1 1    a quarter of what is left, at least one unit

Cores are not equally fast for long: other work, or another machine on the same hardware, slows one of them, and with
equal parts everybody waits for that one at the end of each loop. Shares shrink with what is left, so most are large
and the last ends late by one unit at most: guided self-scheduling (Polychronopoulos and Kuck 1987).
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(64)


@intrinsic  # type: ignore[untyped-decorator]
def _swap(_typing: Any, _address: Any, _expected: Any, _new: Any) -> Any:
    """Write a number of 64 bits where `_expected` lies, in one step; returns what lay there.

    No order among other reads and writes: what a share wrote is read after its loop, whose end has one.
    """

    def generate(_context: Any, build: Any, _signature: Any, arguments: Any) -> Any:
        address, expected, new = arguments
        place = build.inttoptr(address, _WORD.as_pointer())
        return build.extract_value(build.cmpxchg(place, expected, new, "monotonic", "monotonic"), 0)

    return types.intp(types.intp, types.intp, types.intp), generate


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def take(taken: Any, count: Any, unit: Any, parts: Any) -> Any:
    """The next share of `range(count)`, whole units of it but for the last: first and end, equal if all is taken.

    Args:
        taken: `[1 or more]` int64, whose first number is how many are taken; a zero before the loop.
        parts: how many threads take.
    """
    first = 0
    while first < count:
        units = (count - first) // (2 * parts * unit)
        end = min(count, first + max(1, units) * unit)
        found = _swap(taken.ctypes.data, first, end)
        if found == first:
            return first, end
        first = found
    return count, count
