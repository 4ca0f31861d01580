"""What is told of a token's probability and of what else was likely."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import Draw, Logprobs, prompt_logprobs, sample
from protocol import SamplingParams
from protocol.logprobs import FLOOR
from tests.engine.doubles import VOCAB, case, tiny
from tests.engine.sampling.reference import generate, ranked, rules

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_as_defined(told: Logprobs, logits: torch.Tensor, top: int) -> None:
    """Against a plain softmax over one row."""
    row = logits.float().tolist()
    exact = torch.tensor(row, dtype=torch.float64).log_softmax(-1).clamp(min=FLOOR).tolist()
    order = ranked(row)
    assert [token_id for token_id, _ in told.top] == order[:top]
    assert [logprob for _, logprob in told.top] == pytest.approx(
        [exact[token_id] for token_id in order[:top]], abs=1e-5
    )
    assert told.logprob == pytest.approx(exact[told.token_id], abs=1e-5)
    assert told.rank == order.index(told.token_id) + 1
    json.dumps(asdict(told), allow_nan=False)
    assert max(told.logprob, *[logprob for _, logprob in told.top], -1.0) <= 0
    assert sum(math.exp(logprob) for _, logprob in told.top) <= 1.0001


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 5, 64, 100, 333]),
    st.integers(0, 2**32),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.booleans(),
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
)
def test_logprobs_are_those_of_the_raw_distribution(
    vocab: int, seed: int, dtype: torch.dtype, tied: bool, tops: list[int]
) -> None:
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(tops), vocab, generator=noise) * 5
    if tied:
        logits = logits.round()
    logits[torch.rand(logits.shape, generator=noise) < 0.2] = -torch.inf
    logits[:, 0] = 0.0
    logits = logits.to(dtype)
    drawn = sample(logits, [Draw(SamplingParams(logprobs=top), row, 0, 0) for row, top in enumerate(tops)])
    given_ids = torch.randint(0, vocab, (len(tops),), generator=noise).tolist()
    of_prompt = prompt_logprobs(logits, given_ids, tops[0])
    assert [told.token_id for told in of_prompt] == given_ids
    for row, top in enumerate(tops):
        told = drawn.logprobs[row]
        assert told is not None
        assert told.token_id == drawn.token_ids[row]
        assert_as_defined(told, logits[row], top)
        assert_as_defined(of_prompt[row], logits[row], tops[0])


def test_every_output_token_has_one_entry_that_strict_json_can_hold() -> None:
    given = case("B06")
    steps = given["max_tokens"]
    params = [SamplingParams(**row) for row in given["rows"]]
    rows = generate(tiny(), [given["prompt_ids"]] * len(params), params, steps)
    for row, each in zip(rows, params, strict=True):
        assert row.problem is None
        assert len(row.logprobs) == len(row.token_ids) == steps
        for position, told in enumerate(row.logprobs):
            assert told is not None
            assert told.token_id == row.token_ids[position]
            assert len(told.top) == each.top_logprobs
            sequence = [*given["prompt_ids"], *row.token_ids[:position]]
            assert_as_defined(told, tiny()([sequence])[0], each.top_logprobs or 0)
    assert {told.token_id for told in rows[4].logprobs if told} <= {10, 11}


def test_what_the_model_rules_out_has_the_floor() -> None:
    logits = torch.full((2, 70), -torch.inf)
    logits[:, 69] = 3.0
    (told, given_one) = prompt_logprobs(logits, [69, 4], 5)
    assert told == Logprobs(69, 0.0, 1, [(69, 0.0), (0, FLOOR), (1, FLOOR), (2, FLOOR), (3, FLOOR)])
    assert (given_one.logprob, given_one.rank) == (FLOOR, 6)


def test_rules_and_temperature_do_not_show() -> None:
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(7))
    params = SamplingParams(temperature=5.0, allowed_token_ids=[42], logit_bias={1: 50}, logprobs=2)
    (told,) = sample(logits, [Draw(params, 0, 0, 0, rules(params, vocab_size=100))]).logprobs
    assert told is not None
    assert told.token_id == 42
    assert_as_defined(told, logits[0], 2)


def test_only_rows_that_ask_are_told() -> None:
    asked: list[Any] = [None, 0, 3, False, True]
    draws = [Draw(SamplingParams(logprobs=each), 0, 0, 0) for each in asked]
    told = sample(torch.randn(5, VOCAB), draws).logprobs
    assert [each if each is None else len(each.top) for each in told] == [None, 0, 3, None, 0]


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    assert prompt_logprobs(torch.empty(0, VOCAB), [], 5) == []


def test_a_prompt_with_invalid_logits_is_told_in_numbers() -> None:
    logits = torch.full((1, VOCAB), torch.nan)
    (told,) = prompt_logprobs(logits, [3], 2)
    json.dumps(asdict(told), allow_nan=False)
    assert told.logprob == FLOOR
