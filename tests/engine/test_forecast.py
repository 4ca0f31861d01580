"""What is thought to come: lengths from those that have ended, and the fullest moment ahead."""

from __future__ import annotations

import pytest

from engine.blocks import BlockPool
from engine.forecast import TRUST, UNKNOWN, WINDOW, Forecast, OutputLengths
from engine.interface import Request
from engine.sequence import Sequence
from protocol import SamplingParams


def test_the_mean_of_those_that_were_longer() -> None:
    lengths = OutputLengths()
    for length in (10, 20, 60):
        lengths.observe(length)
    assert lengths.remaining(0, 1000) == round(TRUST * 30)
    assert lengths.remaining(10, 1000) == round(TRUST * 30)  # 20 and 60 are left
    assert lengths.remaining(59, 1000) == 1
    assert lengths.remaining(60, 1000) == round(TRUST * UNKNOWN)  # none was as long
    assert lengths.remaining(0, 7) == 7  # never beyond what was asked for
    assert lengths.remaining(7, 7) == 1


def test_only_the_last_ones_count() -> None:
    lengths = OutputLengths()
    for length in [500] * 10 + [8] * WINDOW:
        lengths.observe(length)
    assert lengths.remaining(0, 1000) == round(TRUST * 8)


def sequence(pool: BlockPool, name: str, num_tokens: int, max_tokens: int) -> Sequence:
    """A running sequence with one output token."""
    made = Sequence(Request(name, (tuple(range(num_tokens - 1)),), SamplingParams(), 0, (max_tokens,)), 0, 1)
    made.token_ids.append(5)
    made.block_table = pool.allocate(pool.blocks_for(num_tokens))
    return made


@pytest.mark.parametrize(("num_blocks", "fits"), [(10, False), (18, False), (19, True)])
def test_one_more_is_let_in_if_the_pool_holds_all_at_their_fullest(num_blocks: int, fits: bool) -> None:
    """Two of 8 tokens and one of 4, 16 to come each: 5 blocks now, 17 at last, and half a block each begun."""
    pool = BlockPool(num_blocks, 4)
    forecast = Forecast(pool)
    running = [sequence(pool, name, 8, 17) for name in "ab"]
    newcomer = Sequence(Request("new", ((1, 2, 3, 4),), SamplingParams(), 0, (16,)), 0, 2)
    for _ in range(WINDOW):
        forecast.lengths.observe(33)  # half of what is left of it are the 16 that may come
    assert forecast.fits(forecast.ahead(running), newcomer, 1) == fits


def test_what_an_earlier_end_gives_back_is_counted() -> None:
    pool = BlockPool(12, 4)
    forecast = Forecast(pool)
    soon = sequence(pool, "soon", 24, 2)  # six blocks that come free after a step
    late = Sequence(Request("late", ((1, 2, 3, 4),), SamplingParams(), 0, (32,)), 0, 2)
    forecast.lengths.observe(64)
    assert forecast.fits(forecast.ahead([soon]), late, 1)
    pool.share(soon.block_table)  # somebody else holds them too: its end gives back nothing
    assert not forecast.fits(forecast.ahead([soon]), late, 1)


def admitted(lengths: list[int]) -> int:
    """How many newcomers are let in beside four that have written 20 tokens, after outputs of these lengths."""
    pool = BlockPool(120, 4)
    forecast = Forecast(pool)
    for length in lengths:
        forecast.lengths.observe(length)
    running = [sequence(pool, name, 4, 200) for name in "abcd"]
    for one in running:
        one.token_ids += [5] * 19
        one.block_table += pool.allocate(pool.blocks_for(23) - 1)
    for count in range(pool.num_blocks):
        newcomer = Sequence(Request("new", ((1, 2, 3, 4),), SamplingParams(), 0, (200,)), 0, 2)
        if not forecast.fits(forecast.ahead(running), newcomer, 1):
            return count
        newcomer.block_table = pool.allocate(1)
        running.append(newcomer)
    raise AssertionError("the pool holds no more")


def test_the_wider_outputs_are_spread_the_fewer_run_at_once() -> None:
    """The mean is 40 throughout: who has passed the short ones is thought to become one of the long."""
    counts = [admitted([40 - spread, 40 + spread] * 50) for spread in (0, 10, 25, 35)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] > 0
