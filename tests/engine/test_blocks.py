"""Blocks: free, idle or owned, and the books say so."""

from __future__ import annotations

import pytest

from engine.blocks import BlockPool, IntegrityError
from engine.prefix_cache import ROOT, PrefixCache


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


def test_a_shared_block_is_free_when_its_last_owner_leaves() -> None:
    pool = BlockPool(4, 8)
    table = pool.allocate(2)
    pool.share(table[:1])
    other = table[:1] + pool.allocate(1)
    pool.check_integrity([table, other])
    pool.free(table)
    assert pool.num_used == 2
    pool.check_integrity([other])
    pool.free(other)
    assert pool.num_used == 0


def test_idle_blocks_keep_their_prefix_until_the_room_is_needed() -> None:
    pool = BlockPool(3, 2)
    table = pool.allocate(2)
    first = pool.prefixes.add(ROOT, (1, 2), table[0])
    pool.prefixes.add(first, (3, 4), table[1])
    pool.free(table)
    pool.check_integrity([])
    assert pool.num_free == 3
    (other,) = pool.allocate(1)  # the one that holds nothing
    assert other not in table
    assert pool.num_evictions == 0
    assert pool.allocate(1) == [table[1]]  # the tail before what it hangs on
    assert pool.prefixes.find(first, (3, 4)) is None
    entry = pool.prefixes.find(ROOT, (1, 2))
    assert entry is not None
    pool.share([entry.block])
    assert pool.num_free == 0
    pool.check_integrity([[other], [table[1]], [entry.block]])


def test_a_prefix_is_known_by_all_its_tokens() -> None:
    cache = PrefixCache()
    first = cache.add(ROOT, (1, 2), 0)
    other = cache.add(ROOT, (1, 3), 1)
    second = cache.add(first, (5, 6), 2)
    assert cache.find(other, (5, 6)) is None
    assert cache.find(ROOT, (5, 6)) is None
    assert cache.add(first, (5, 6), 3) == second  # computed twice: the first stays
    assert cache.find(first, (5, 6)) == (2, second)
    assert 3 not in cache
    cache.forget(0)
    assert cache.find(ROOT, (1, 2)) is None
    assert cache.add(ROOT, (1, 2), 4) not in (first, other, second)  # so what hung on the old one stays lost
