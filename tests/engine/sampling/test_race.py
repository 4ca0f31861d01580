"""Races of ids by weight, against a plain one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.race import first_of, first_of_all, noise_size
from tests.engine.sampling.reference import chi_square

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (1, 2, 63, 64, 65, 500, 4095, 4096, 4097, 9000)


def winner(weights: Sequence[float], noise: Sequence[float]) -> int:
    """By the digits of the ids: the first first, each among the ids that begin as those before it have ended."""
    of_ids, of_buckets, of_blocks = noise[:64], noise[64:128], noise[128:]
    left = [token_id for token_id, weight in enumerate(weights) if weight > 0]
    for size, digits in ((4096, of_blocks), (64, of_buckets), (1, of_ids)):
        sums: dict[int, float] = {}
        for token_id in left:
            sums[token_id // size] = sums.get(token_id // size, 0.0) + weights[token_id]
        first = min(sums, key=lambda prefix: digits[prefix if size == 4096 else prefix % 64] / sums[prefix])
        left = [token_id for token_id in left if token_id // size == first]
    (token_id,) = left
    return token_id


@st.composite
def races(draw_from: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of a few rows, many or few of them 0, and noise."""
    size, rows = draw_from(st.sampled_from(SIZES)), draw_from(st.integers(1, 3))
    dice = torch.Generator().manual_seed(draw_from(st.integers(0, 2**32)))
    weights = (torch.randn(rows, size, generator=dice) * draw_from(st.sampled_from([0.1, 3.0, 20.0]))).exp()
    weights[torch.rand(rows, size, generator=dice) < draw_from(st.sampled_from([0.0, 0.5, 0.999]))] = 0.0
    weights[torch.arange(rows), torch.randint(size, (rows,), generator=dice)] = 1.0
    noise = torch.rand(rows, noise_size(size), generator=dice, dtype=torch.float64).clamp(min=1e-9)
    return weights, -noise.log()


@settings(max_examples=30, deadline=None)
@given(races())
def test_the_winner_is_that_of_a_plain_race(race: tuple[torch.Tensor, torch.Tensor]) -> None:
    weights, noise = race
    expected = [winner(*row) for row in zip(weights.double().tolist(), noise.tolist(), strict=True)]
    assert first_of_all(weights, noise).tolist() == expected
    ids = torch.arange(weights.shape[1]).flip(0).expand_as(weights)
    assert first_of(ids, weights.double().gather(1, ids), noise).tolist() == expected
    few = ids[:, (weights.gather(1, ids) > 0).any(dim=0)]
    assert first_of(few, weights.double().gather(1, few), noise).tolist() == expected


def test_ties_go_to_the_smaller_id() -> None:
    weights = torch.zeros(3, 9000)
    weights[0] = 1.0
    weights[1, [70, 8999]] = 1.0
    weights[2, [4200, 4300, 4301]] = torch.tensor([2.0, 1.0, 1.0])
    noise = torch.ones(3, noise_size(9000), dtype=torch.float64)
    assert first_of_all(weights, noise).tolist() == [0, 70, 4200]


@pytest.mark.parametrize("least", [1e-45, 1e-38, 1.0])
@pytest.mark.parametrize("numbers", [2.0**-53, 1 - 2.0**-53], ids=["earliest", "latest"])
def test_the_only_id_with_any_weight_wins_whatever_the_noise(least: float, numbers: float) -> None:
    ids = torch.tensor([0, 63, 64, 4095, 4096, 8999])
    weights = torch.zeros(len(ids), 9000).scatter_(1, ids.unsqueeze(-1), least)
    noise = -torch.log1p(-torch.full((len(ids), noise_size(9000)), numbers, dtype=torch.float64))
    assert first_of_all(weights, noise).tolist() == ids.tolist()
    few = torch.eye(len(ids), dtype=torch.float64) * least
    assert first_of(ids.expand(len(ids), -1), few, noise).tolist() == ids.tolist()


def test_ids_win_as_often_as_they_weigh() -> None:
    """Of three digits: among blocks, buckets and ids."""
    dice = torch.Generator().manual_seed(3)
    weights = torch.randn(9000, generator=dice).mul(3).exp()
    noise = torch.empty(20_000, noise_size(9000), dtype=torch.float64).exponential_(generator=dice)
    first = torch.cat([first_of_all(weights.expand(len(some), -1), some) for some in noise.split(100)])
    ranked = weights.argsort(descending=True)
    shares = weights[ranked].double() / weights.sum()
    groups = torch.empty(9000, dtype=torch.long)
    groups[ranked] = (shares.cumsum(-1) * 50).long().clamp(max=49)
    mass = torch.zeros(50, dtype=torch.float64).index_add_(0, groups[ranked], shares)
    statistic, limit = chi_square(groups[first].tolist(), mass)
    assert statistic < limit
