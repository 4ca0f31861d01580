"""Blocks: free, idle or owned, and the books say so."""

from __future__ import annotations

import pytest

from engine.blocks import BlockPool, IntegrityError
from engine.prefix_cache import Prefix, PrefixCache


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


def holding(pool: BlockPool, *tokens: int) -> list[Prefix]:
    """The path of tokens whose blocks have been computed and are idle now."""
    count = len(tokens) // pool.block_size
    path: list[Prefix] = []
    pool.prefixes.extend(path, tokens, count)
    table = pool.allocate(count)
    for prefix, block in zip(path, table, strict=True):
        pool.prefixes.hold(prefix, block)
    pool.free(table)
    return path


def held(path: list[Prefix]) -> list[bool]:
    return [prefix.block is not None for prefix in path]


def test_idle_blocks_keep_their_prefix_until_the_room_is_needed() -> None:
    pool = BlockPool(3, 2)
    path = holding(pool, 1, 2, 3, 4)
    blocks = [prefix.block for prefix in path]
    pool.check_integrity([])
    assert pool.num_free == 3
    (other,) = pool.allocate(1)  # the one that holds nothing
    assert other not in blocks
    assert pool.num_evictions == 0
    (tail,) = pool.allocate(1)
    assert tail == blocks[1]  # the tail before what it hangs on
    assert held(path) == [True, False]
    pool.share([blocks[0] or 0])
    assert pool.num_free == 0
    pool.check_integrity([[other], [tail], [blocks[0] or 0]])


def test_what_is_wanted_outlives_what_was_used_later() -> None:
    pool = BlockPool(6, 2)
    first, second, third = (holding(pool, *tokens) for tokens in [(1, 2, 3, 4), (5, 6, 7, 8), (9, 9, 9, 8)])
    pool.want(first)
    pool.want(second)
    pool.check_integrity([])
    lost = []
    for _ in range(6):
        pool.allocate(1)
        lost.append([held(path).count(False) for path in (first, second, third)])
    # What nobody wants, then what the last in line wants, then what the first does; of each the tail first.
    assert lost == [[0, 0, 1], [0, 0, 2], [0, 1, 2], [0, 2, 2], [1, 2, 2], [2, 2, 2]]


def test_what_is_wanted_no_more_goes_as_what_was_used_last() -> None:
    pool = BlockPool(4, 2)
    early, late = holding(pool, 1, 2, 3, 4), holding(pool, 5, 6, 7, 8)
    pool.want(early)
    pool.want(early)
    pool.unwant(early)
    pool.check_integrity([])
    assert pool.allocate(1)  # one still wants it
    assert (held(early), held(late)) == ([True, True], [True, False])
    pool.unwant(early)
    pool.check_integrity([[prefix] for prefix in range(4) if pool.num_owners(prefix)])
    pool.allocate(2)
    assert (held(early), held(late)) == ([True, False], [False, False])


def test_a_block_that_is_wanted_when_it_comes_free_is_kept_longest() -> None:
    pool = BlockPool(4, 2)
    in_use, waiting = holding(pool, 1, 2, 3, 4), holding(pool, 5, 6, 7, 8)
    table = [prefix.block or 0 for prefix in in_use]
    pool.share(table)
    pool.want(waiting)
    pool.want(in_use)
    pool.free(table)
    pool.check_integrity([])
    pool.allocate(3)
    assert (held(in_use), held(waiting)) == ([True, False], [False, False])


def test_wants_of_what_no_block_holds_count_once_one_does() -> None:
    pool = BlockPool(2, 2)
    path: list[Prefix] = []
    pool.prefixes.extend(path, [1, 2], 1)
    pool.want(path)
    wanted, other = holding(pool, 1, 2), holding(pool, 3, 4)
    assert wanted == path
    pool.allocate(1)
    assert (held(wanted), held(other)) == ([True], [False])
    pool.allocate(1)
    assert held(path) == [False]
    assert len(list(pool.prefixes)) == 2  # they have a path still
    for one in (path, wanted, other):
        pool.prefixes.release(one)
    assert not list(pool.prefixes)


def test_a_prefix_is_known_by_all_its_tokens() -> None:
    cache = PrefixCache(2)

    def path(*tokens: int) -> list[Prefix]:
        found: list[Prefix] = []
        cache.extend(found, tokens, len(tokens) // 2)
        return found

    first, other = path(1, 2, 5, 6), path(1, 3, 5, 6)
    assert not set(first) & set(other)
    for block, prefix in enumerate(first):
        cache.hold(prefix, block)
    cache.hold(first[1], 7)  # computed twice: the first stays
    assert (first[1].block, 7 in cache) == (1, False)
    assert path(1, 2, 5, 6, 7, 8)[:2] == first
    cache.release(first)
    assert path(1, 2, 5, 6)[1].block == 1  # the blocks remember it
    cache.forget(0)
    assert path(1, 2)[0].block is None


def test_what_hung_on_a_lost_prefix_stays_lost() -> None:
    cache = PrefixCache(2)
    path: list[Prefix] = []
    cache.extend(path, [1, 2, 3, 4], 2)
    for block, prefix in enumerate(path):
        cache.hold(prefix, block)
    cache.release(path)
    cache.forget(0)
    cache.extend(path, [1, 2, 3, 4], 2)
    assert held(path) == [False, False]
    assert len(cache) == 1  # the old tail, until its block is needed
