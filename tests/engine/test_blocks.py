"""Blocks: free or owned once, and the books say so."""

from __future__ import annotations

import pytest

from engine.blocks import BlockPool, IntegrityError


def test_blocks_come_and_go() -> None:
    pool = BlockPool(4, 8)
    first, second = pool.allocate(1), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_used, pool.capacity) == (0, 4, 32)
    pool.check_integrity([first, second])
    pool.free(second)
    assert pool.num_free == 3
    pool.check_integrity([first])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert BlockPool(4, 8).blocks_for(tokens) == blocks


def test_more_than_free_is_refused_whole() -> None:
    pool = BlockPool(2, 8)
    with pytest.raises(IntegrityError, match="3 blocks asked for, 2 of 2 are free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_block_returned_twice_is_noticed() -> None:
    pool = BlockPool(2, 8)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(IntegrityError, match="returned twice"):
        pool.free([block])


@pytest.mark.parametrize("tables", [[[0], [0, 1]], [[0]], [[0, 1, 2]], [[]]])
def test_books_that_do_not_balance_are_noticed(tables: list[list[int]]) -> None:
    pool = BlockPool(3, 8)
    assert pool.allocate(2) == [0, 1]
    with pytest.raises(IntegrityError):
        pool.check_integrity(tables)


@pytest.mark.parametrize("sizes", [(0, 8), (8, 0)])
def test_an_empty_pool_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(*sizes)
