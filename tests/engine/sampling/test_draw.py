"""Which token is drawn from given logits, and what it depends on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.sampling import Draw, filters, sample
from engine.sampling.race import noise_size
from protocol import SamplingParams
from tests.engine.doubles import case, tiny, tiny_references
from tests.engine.sampling.reference import chi_square, generate, kept

pytestmark = pytest.mark.usefixtures("one_thread")


def draws(count: int, **params: Any) -> list[Draw]:
    """Rows that differ in their seed alone."""
    return [Draw(SamplingParams(**params), seed, 0, 0) for seed in range(count)]


def drawn(logits: torch.Tensor, rows: list[Draw]) -> list[int]:
    sampled = sample(logits, rows)
    assert sampled.problems == [None] * len(rows)
    return sampled.token_ids


def can_be_drawn(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """The ids that win where the noise of all their digits says that they come first: those with any weight."""
    ids = torch.arange(len(logits))
    noise = torch.ones(len(ids), noise_size(len(ids)), dtype=torch.float64)
    for digit in (ids % 64, 64 + ids // 64 % 64, 128 + ids // 4096):
        noise[ids, digit] = 1e-300
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.sampling.sampler.noise_for", lambda *_: noise)
        first = drawn(logits.expand(len(ids), -1), [Draw(params, 0, 0, 0)] * len(ids))
    return {token_id for token_id, winner in enumerate(first) if token_id == winner}


@st.composite
def filtered(draw_from: st.DrawFn) -> tuple[torch.Tensor, SamplingParams]:
    """A row of logits, with ties and impossible ids or without, and any mix of filters."""
    size = draw_from(st.sampled_from([1, 2, 5, 63, 64, 65, 100, 128, 200, 333]))
    noise = torch.Generator().manual_seed(draw_from(st.integers(0, 2**32)))
    logits = torch.randn(size, generator=noise) * draw_from(st.sampled_from([0.5, 2.0, 6.0]))
    if draw_from(st.booleans()):
        logits = logits.round()
    logits[torch.rand(size, generator=noise) < draw_from(st.sampled_from([0.0, 0.0, 0.4]))] = -torch.inf
    assume(bool(logits.isfinite().any()))
    params = SamplingParams(
        temperature=draw_from(st.sampled_from([0.3, 1.0, 2.5])),
        top_k=draw_from(st.one_of(st.sampled_from([-1, 0, 1]), st.integers(1, 400))),
        top_p=draw_from(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))),
        min_p=draw_from(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))),
    )
    return logits.to(draw_from(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))), params


CUTS = st.sampled_from([filters.CUTS, (3, 20), (40,), ()])


def check_filters(row: tuple[torch.Tensor, SamplingParams], cuts: tuple[int, ...]) -> None:
    logits, params = row
    expected, nearest = kept(logits.float().tolist(), params)
    assume(nearest > 1e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "CUTS", cuts)
        possible = can_be_drawn(logits, params)
    # What is less likely may have no weight in float32.
    assert {token_id for token_id, share in expected.items() if share > 1e-30} <= possible <= set(expected)


@settings(max_examples=40, deadline=None)
@given(filtered(), CUTS)
def test_exactly_what_the_filters_leave_can_be_drawn(
    row: tuple[torch.Tensor, SamplingParams], cuts: tuple[int, ...]
) -> None:
    check_filters(row, cuts)


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@given(filtered(), CUTS)
def test_exactly_what_the_filters_leave_can_be_drawn_at_length(
    row: tuple[torch.Tensor, SamplingParams], cuts: tuple[int, ...]
) -> None:
    check_filters(row, cuts)


@pytest.mark.parametrize("row", case("B03")["rows"], ids=lambda row: str(row["p"]))
def test_edges_of_top_k_top_p_and_min_p(row: dict[str, Any]) -> None:
    logits = torch.tensor(case("B03")["probs"]).log().expand(2000, -1)
    assert sorted(set(drawn(logits, draws(2000, **row["p"])))) == row["support"]


@pytest.mark.parametrize("invalid", case("B03")["invalid"], ids=str)
def test_values_outside_the_edges_are_refused(invalid: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SamplingParams(**invalid)


@pytest.mark.parametrize(
    ("vocab", "cuts"), [(512, filters.CUTS), pytest.param(1000, (32, 128), marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.7}, {"top_k": 300, "top_p": 0.9}, {"temperature": 2.5, "min_p": 0.01}], ids=str
)
def test_draws_follow_the_distribution(
    vocab: int, cuts: tuple[int, ...], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "CUTS", cuts)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 2
    expected, _ = kept(logits.tolist(), SamplingParams(**params))
    rows = [Draw(SamplingParams(**params), seed, 0, seed % 7) for seed in range(1600)]
    seen = drawn(logits.expand(1600, -1), rows)
    # Grouped so that each of 20 groups is expected often enough for the statistic.
    shares = torch.tensor(list(expected.values()))
    groups = (shares.cumsum(-1) * 20).long().clamp(max=19)
    group = dict(zip(expected, groups.tolist(), strict=True))
    mass = torch.zeros(20, dtype=torch.double).index_add_(0, groups, shares.double())
    statistic, limit = chi_square([group[token_id] for token_id in seen], mass)
    assert statistic < limit


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_draws_that_differ_in_one_thing_are_independent(seed: int, axis: str) -> None:
    """Each follows the distribution, and so does each pair of neighbours."""
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    params, at = SamplingParams(), {"seed": seed, "choice": 0, "position": 0}
    step = -1 if axis == "seed" and seed else 1
    rows = [Draw(params, **{**at, axis: at[axis] + step * number}) for number in range(4000)]
    seen = drawn(shares.log().expand(4000, -1), rows)
    pairs = [4 * one + other for one, other in pairwise(seen)]
    for observed, expected in ((seen, shares), (pairs, torch.outer(shares, shares).flatten())):
        statistic, limit = chi_square(observed, expected)
        assert statistic < limit


@pytest.mark.parametrize("moved_by", [1e-5, pytest.param(1e-3, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.8, "top_p": 0.95},
        {"top_k": 50},
        {"min_p": 0.01},
        pytest.param({"top_k": 600, "top_p": 0.99}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_change_of_the_logits_changes_as_few_draws(params: dict[str, Any], moved_by: float) -> None:
    """Logits that are computed again in a batch of another shape differ by some 1e-5.

    The second of a race comes after the first by t of its time with density 1 - p at t = 0, p the winner's share: of
    n draws at most n times the change fall the other way in each of three races. What a border that moves (of top_k,
    top_p or min_p) lets in or shuts out has no more weight than that.
    """
    dice = torch.Generator().manual_seed(8)
    logits = torch.randn(20_000, generator=dice) - 1.3 * (torch.randperm(20_000, generator=dice) + 1).log()
    rows = [Draw(SamplingParams(**params), 2**63 + number, number % 3, number) for number in range(1000)]
    moved = logits + moved_by * torch.randn(20_000, generator=dice)
    before, after = (drawn(each.expand(len(rows), -1), rows) for each in (logits, moved))
    changed = sum(one != other for one, other in zip(before, after, strict=True))
    assert len(set(before)) > 15
    assert changed <= 1 + 3 * moved_by * len(rows)


def test_a_row_draws_the_same_in_any_batch_and_at_any_place() -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(2)) * 3
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 5},
        {"top_p": 0.9},
        {"temperature": 0.0},
        {"top_k": 2000, "top_p": 0.99},
        {"min_p": 0.02},
    ]
    rows = [Draw(SamplingParams(**kinds[i % 6]), i, i % 3, i % 11) for i in range(64)]
    together = drawn(logits, rows)
    assert [drawn(logits[i : i + 1], rows[i : i + 1])[0] for i in range(64)] == together
    backwards = list(range(63, -1, -1))
    assert drawn(logits[backwards], [rows[i] for i in backwards]) == together[::-1]


def test_the_cuts_and_the_full_sort_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(200, 4096, generator=torch.Generator().manual_seed(3)) * 4
    logits = logits.round(decimals=1)  # with many ties
    kinds = [(0, 0.5, 0.0), (50, 0.9, 0.0), (64, 1.0, 0.001), (65, 0.999, 0.0), (500, 0.9, 0.0)]
    rows = [
        Draw(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p), seed, 0, 0)
        for seed in range(40)
        for top_k, top_p, min_p in kinds
    ]
    fast = drawn(logits, rows)
    monkeypatch.setattr(filters, "CUTS", (4096,))
    assert drawn(logits, rows) == fast


def test_ties_go_to_the_smaller_id() -> None:
    logits = torch.zeros(300, 1024)
    assert set(drawn(logits, draws(300, temperature=0.0))) == {0}
    assert set(drawn(logits, draws(300, top_k=3))) == {0, 1, 2}


def test_min_p_keeps_what_is_as_likely_as_the_likeliest() -> None:
    logits = torch.zeros(300, 1024)
    logits[:, :1000] = -1.0
    few = drawn(logits, draws(300, min_p=1.0))
    many = drawn(-logits, draws(300, min_p=1.0))  # more than are ranked
    assert set(few) == set(range(1000, 1024))
    assert max(many) < 1000
    assert len(set(many)) > 200


@pytest.mark.parametrize("filter", [{}, {"top_p": 0.99}], ids=str)
def test_seed_choice_and_position_each_matter(filter: dict[str, Any]) -> None:
    params = SamplingParams(**filter)
    axes = [
        [Draw(params, each, 0, 0) for each in range(50)],
        [Draw(params, 0, each, 0) for each in range(50)],
        [Draw(params, 0, 0, each) for each in range(50)],
    ]
    seen = [drawn(torch.zeros(50, 20_000), rows) for rows in axes]
    assert all(len(set(row)) > 45 for row in seen)
    assert len({tuple(row) for row in seen}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_tiny_temperatures_give_the_greedy_ids_beside_a_random_row(dtype: torch.dtype, scale: float) -> None:
    given = case("B02")
    params = [
        SamplingParams(temperature=float(temperature), seed=given["params"]["seed"])
        for temperature in [*given["temperatures"], 1.0]
    ]

    def logits(sequences: list[list[int]]) -> torch.Tensor:
        return (tiny()(sequences) * scale).to(dtype)

    rows = generate(logits, [given["prompt_ids"]] * 6, params, steps=8)
    (greedy,) = (
        ref["greedy_40"][:8] for ref in tiny_references() if ref["prompt_ids"] == given["prompt_ids"]
    )
    assert [row.token_ids for row in rows[:5]] == [greedy] * 5
    assert generate(logits, [given["prompt_ids"]], params[5:], steps=8) == rows[5:]


@pytest.mark.parametrize("vocab", [512, 500])
@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-12, 1e-4])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
def test_tiny_temperatures_are_greedy(temperature: float, filters: dict[str, Any], vocab: int) -> None:
    for scale, dtype in [(1.0, torch.float32), (100.0, torch.float16), (1e36, torch.float32)]:
        logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(4)) * scale
        logits[:, 7] = logits.amax(-1) + 0.05 * scale
        assert drawn(logits.to(dtype), draws(8, temperature=float(temperature), **filters)) == [7] * 8


def test_a_huge_temperature_levels_all_but_what_is_impossible() -> None:
    logits = torch.randn(1500, 4) * 10
    logits[:, 2] = -torch.inf
    assert set(drawn(logits, draws(1500, temperature=1e300))) == {0, 1, 3}


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), -0.1])
def test_impossible_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(ValidationError):
        SamplingParams(temperature=temperature)


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((2000, 700), -torch.inf)
    logits[:, [5, 333, 699]] = 0.0
    for params in ({}, {"top_p": 0.999}, {"top_k": 100}, {"min_p": 1e-9}):
        assert set(drawn(logits, draws(2000, **params))) == {5, 333, 699}


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(4, 300)
    before = logits.clone()
    for params in ({}, {"top_p": 0.9}, {"top_k": 7, "min_p": 0.1}):
        sample(logits, draws(4, logprobs=3, **params))
    assert torch.equal(logits, before)
