"""Which token is drawn, and what it depends on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from engine import sampling
from engine.philox import philox4x32, uniform
from engine.sampling import Draw, sample
from protocol import SamplingParams
from tests.engine.doubles import case

pytestmark = pytest.mark.usefixtures("one_thread")


def draws(count: int, **params: Any) -> list[Draw]:
    """Rows that differ in their seed alone."""
    return [Draw(SamplingParams(**params), seed, 0, 0) for seed in range(count)]


def drawn(logits: torch.Tensor, rows: list[Draw]) -> list[int]:
    token_ids, usable = sample(logits, rows)
    assert all(usable)
    return token_ids


def chi_square(observed: list[int], probabilities: torch.Tensor) -> tuple[float, float]:
    """Pearson's statistic, and the value that a right sampler exceeds once in about 30,000 runs (Wilson-Hilferty)."""
    kept = probabilities > 0
    counts = torch.bincount(torch.tensor(observed), minlength=len(probabilities)).double()
    assert counts[~kept].sum() == 0
    expected = probabilities[kept] * len(observed)
    freedom = int(kept.sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 4.0 * (2 / (9 * freedom)) ** 0.5) ** 3
    return float(((counts[kept] - expected) ** 2 / expected).sum()), limit


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_its_authors_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    columns = np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None]
    assert philox4x32(*columns)[:, 0].tolist() == words


def test_uniform_numbers_depend_on_each_of_seed_choice_and_position() -> None:
    numbers = uniform([1, 2, 1, 1, 2**64 - 1, 1 + 2**32], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0])
    assert len(set(numbers.tolist())) == 6
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert uniform([2], [0], [0])[0] == numbers[1]


@pytest.mark.parametrize("row", [row for row in case("B03")["rows"] if "min_p" not in row["p"]], ids=str)
def test_edges_of_top_k_and_top_p(row: dict[str, Any]) -> None:
    logits = torch.tensor(case("B03")["probs"]).log().expand(2000, -1)
    seen = drawn(logits, draws(2000, **row["p"]))
    assert sorted(set(seen)) == row["support"]


@pytest.mark.parametrize("invalid", [p for p in case("B03")["invalid"] if "min_p" not in p], ids=str)
def test_values_outside_the_edges_are_refused(invalid: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SamplingParams(**invalid)


@pytest.mark.parametrize(("vocab", "cuts"), [(512, (256, 8192)), (1000, (32, 128))])
@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 20}, {"top_p": 0.7}, {"top_k": 300, "top_p": 0.9}, {"temperature": 2.5, "top_p": 0.99}],
    ids=str,
)
def test_draws_follow_the_distribution(
    vocab: int, cuts: tuple[int, ...], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the definition, worked out plainly; with small cuts some parameters need each of them, or all."""
    monkeypatch.setattr(sampling, "CUTS", cuts)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 2
    weights = (logits.double() / params.get("temperature", 1.0)).softmax(-1)
    order = weights.argsort(descending=True)[: params.get("top_k", vocab)]
    ranked = weights[order] / weights[order].sum()
    keep = (ranked.cumsum(-1) - ranked) < params.get("top_p", 1.0)
    expected = torch.zeros(vocab, dtype=torch.double)
    expected[order[keep]] = ranked[keep] / ranked[keep].sum()
    rows = [Draw(SamplingParams(**params), seed, 0, seed % 7) for seed in range(1600)]
    seen = torch.tensor(
        [
            token
            for part in range(0, 1600, 400)
            for token in drawn(logits.expand(400, -1), rows[part : part + 400])
        ]
    )
    # Grouped so that each of 20 groups is expected often enough for the statistic.
    edges = expected[order].cumsum(-1)
    group = torch.empty(vocab, dtype=torch.long).index_put_((order,), (edges * 20).long().clamp(max=19))
    outside = torch.ones(vocab, dtype=torch.bool).index_fill_(0, order[keep], False)
    assert not outside[seen].any()
    mass = torch.zeros(20, dtype=torch.double).index_add_(0, group[order], expected[order])
    statistic, limit = chi_square(group[seen].tolist(), mass)
    assert statistic < limit


def test_a_row_draws_the_same_in_any_batch_and_at_any_place() -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(2)) * 3
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 5},
        {"top_p": 0.9},
        {"temperature": 0.0},
        {"top_k": 2000, "top_p": 0.99},
    ]
    rows = [Draw(SamplingParams(**kinds[i % 5]), i, i % 3, i % 11) for i in range(64)]
    together = drawn(logits, rows)
    assert [drawn(logits[i : i + 1], rows[i : i + 1])[0] for i in range(64)] == together
    backwards = list(range(63, -1, -1))
    assert drawn(logits[backwards], [rows[i] for i in backwards]) == together[::-1]


def test_the_cuts_and_the_full_sort_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(200, 4096, generator=torch.Generator().manual_seed(3)) * 4
    logits = logits.round(decimals=1)  # with many ties
    rows = [
        Draw(
            SamplingParams(top_k=[0, 50, 256, 257, 1000][i % 5], top_p=[0.5, 0.9, 0.999, 1.0][i % 4]), i, 0, 0
        )
        for i in range(200)
    ]
    fast = drawn(logits, rows)
    monkeypatch.setattr(sampling, "CUTS", ())
    assert drawn(logits, rows) == fast


def test_ties_go_to_the_smaller_id() -> None:
    logits = torch.zeros(300, 1024)
    assert set(drawn(logits, draws(300, temperature=0.0))) == {0}
    assert set(drawn(logits, draws(300, top_k=3))) == {0, 1, 2}


@pytest.mark.parametrize("vocab", [512, 500])
@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-12, 1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_tiny_temperatures_are_greedy(
    temperature: float, dtype: torch.dtype, scale: float, vocab: int
) -> None:
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(4)) * scale
    logits[:, 7] = logits.amax(-1) + 0.05 * scale
    assert drawn(logits.to(dtype), draws(8, temperature=float(temperature))) == [7] * 8
    assert drawn(logits.to(dtype), draws(8, temperature=float(temperature), top_p=0.9)) == [7] * 8


def test_a_huge_temperature_levels_all_but_what_is_impossible() -> None:
    logits = torch.randn(1500, 4) * 10
    logits[:, 2] = -torch.inf
    assert set(drawn(logits, draws(1500, temperature=1e300))) == {0, 1, 3}


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), -0.1])
def test_impossible_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(ValidationError):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize("vocab", [512, 500])
@pytest.mark.parametrize(
    "bad", [[float("nan")], [float("-inf")] * 500, [float("inf")] * 2], ids=["nan", "-inf", "+inf"]
)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 4}], ids=str)
def test_only_the_bad_row_is_reported(bad: list[float], params: dict[str, Any], vocab: int) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(5))
    good, _ = sample(logits, draws(4, **params))
    logits[2, : len(bad) if len(bad) < 500 else vocab] = torch.tensor(bad[0])
    token_ids, usable = sample(logits, draws(4, **params))
    assert usable == [True, True, False, True]
    assert token_ids[:2] + token_ids[3:] == good[:2] + good[3:]
    assert 0 <= token_ids[2] < vocab


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((2000, 700), -torch.inf)
    logits[:, [5, 333, 699]] = 0.0
    for params in ({}, {"top_p": 0.999}, {"top_k": 100}):
        assert set(drawn(logits, draws(2000, **params))) == {5, 333, 699}
