"""Shares of a loop that threads take as they come free: everything once, whatever takes how many when."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import pytest

from engine.panels import row_blocks, shares
from engine.shares import take


@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize(("count", "unit"), [(0, 1), (1, 1), (36, 1), (3072, 1), (60, 4), (10, 4), (3, 4)])
def test_shares_are_all_there_is_in_whole_units_that_shrink(count: int, unit: int, parts: int) -> None:
    taken = np.zeros(1, np.int64)
    ends, sizes = [0], []
    while (share := take(taken, count, unit, parts))[0] < share[1]:
        first, end = share
        assert first == ends[-1]
        assert (end - first) % unit == 0 or end == count
        ends.append(end)
        sizes.append(end - first)
    assert ends[-1] == count
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or sizes[0] <= max(unit, count // (2 * parts))


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _mark(taken: Any, marks: Any) -> Any:
    shares = 0
    first, end = take(taken, marks.shape[0], 1, 2)
    while first < end:
        for place in range(first, end):
            marks[place] += 1
        shares += 1
        first, end = take(taken, marks.shape[0], 1, 2)
    return shares


def test_threads_that_take_at_once_take_nothing_twice() -> None:
    with ThreadPoolExecutor(4) as threads:
        for _ in range(50):
            taken, marks = np.zeros(1, np.int64), np.zeros(1000, np.int64)
            running = [threads.submit(_mark, taken, marks) for _ in range(4)]
            assert sum(thread.result() for thread in running) >= 11
            assert marks.tolist() == [1] * 1000


@pytest.mark.parametrize("rows", [1, 96, 97, 500])
@pytest.mark.parametrize(("panels", "unit"), [(60, 4), (37, 1), (3, 4)])
def test_threads_that_take_parts_of_a_product_leave_none_and_take_none_twice(
    rows: int, panels: int, unit: int
) -> None:
    taken, marks = np.zeros(row_blocks(rows), np.int64), np.zeros((rows, panels), np.int64)
    threads = [shares(taken, rows, panels, unit, 3) for _ in range(3)]
    while threads:
        for thread in list(threads):
            share = next(thread, None)
            if share is None:
                threads.remove(thread)
            else:
                top, bottom, first, end = share
                marks[top:bottom, first:end] += 1
    assert (marks == 1).all()
