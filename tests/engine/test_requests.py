"""What is checked before a prompt enters an engine."""

from __future__ import annotations

from typing import Any

import pytest

from engine.requests import build_request, check_model
from protocol import ErrorCode, Job, RequestError
from tests.engine.doubles import case

VOCAB, CONTEXT = 512, 64


def job(**fields: Any) -> Job:
    return Job.model_validate({"id": "j", "prompt": "x", **fields})


def with_params(**params: Any) -> Job:
    return job(params=params)


def refusal(asked: Job, prompts: list[list[int]]) -> RequestError:
    with pytest.raises(RequestError) as refused:
        build_request(asked, prompts, VOCAB, CONTEXT)
    return refused.value


# How long


@pytest.mark.parametrize("row", case("C02")["rows"], ids=lambda row: str(row["prompt_len"]))
def test_prompts_around_the_context_limit(row: dict[str, Any]) -> None:
    length = row["prompt_len"]
    prompt = [3 + 7 * i % 500 for i in range(length)]
    asked = job(params=case("C02")["params"])
    if "expect_tokens" in row:
        assert build_request(asked, [prompt], VOCAB, CONTEXT).max_tokens == (row["expect_tokens"],)
        assert build_request(job(), [prompt], VOCAB, CONTEXT).max_tokens == (CONTEXT - length,)
        return
    error = refusal(asked, [prompt])
    assert error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert f"prompt has {length} tokens" in error.message
    assert f"holds {CONTEXT}" in error.message


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        ({}, 55),
        ({"max_tokens": None}, 55),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 55}, 55),
        ({"max_tokens": 100000}, 55),
        ({"max_completion_tokens": 7, "max_tokens": 20}, 7),
        ({"max_completion_tokens": 100}, 55),
        ({"min_tokens": 60}, 55),
    ],
    ids=str,
)
def test_an_answer_is_cut_to_what_the_context_holds(params: dict[str, Any], tokens: int) -> None:
    assert build_request(with_params(**params), [[5] * 9], VOCAB, CONTEXT).max_tokens == (tokens,)


def test_each_prompt_has_its_own_limit_and_its_own_error() -> None:
    made = build_request(with_params(max_tokens=10, n=2), [[5] * 60, [6]], VOCAB, CONTEXT)
    assert (made.prompts, made.max_tokens) == (((5,) * 60, (6,)), (4, 10))
    assert (made.num_choices, made.num_prompt_tokens) == (4, 61)
    assert refusal(job(), [[5], []]).message == "prompt[1] is empty"
    assert refusal(job(), [[5] * 64, [5]]).message.startswith("prompt[0] has 64 tokens")
    assert refusal(job(), [[5], [5, 6, 512]]).message.startswith("prompt[1][2] is 512: ")


def test_an_empty_prompt_is_refused() -> None:
    error = refusal(job(), [[]])
    assert (error.code, error.message) == (ErrorCode.INVALID_REQUEST, "prompt is empty")


@pytest.mark.parametrize("keep", [1, 3, 63, 64, 10**30])
def test_a_prompt_is_cut_to_its_last_tokens_where_asked(keep: int) -> None:
    prompt = list(range(63))
    made = build_request(with_params(truncate_prompt_tokens=keep, n=3), [prompt, [7]], VOCAB, CONTEXT)
    assert made.prompts == (tuple(prompt[-keep:] if keep < 63 else prompt), (7,))
    assert made.max_tokens == (64 - min(keep, 63), 63)


def test_what_is_cut_off_is_not_looked_at() -> None:
    made = build_request(with_params(truncate_prompt_tokens=2), [[9999, *[5] * 100]], VOCAB, CONTEXT)
    assert made.prompts == ((5, 5),)
    error = refusal(with_params(truncate_prompt_tokens=64), [[5] * 100])
    assert (error.code, "64 tokens" in error.message) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, True)


# Which ids


@pytest.mark.parametrize("row", case("C03")["rows"], ids=lambda row: str(row["prompt"]))
def test_prompts_of_ids(row: dict[str, Any]) -> None:
    prompt = row["prompt"]
    ids = all(type(token_id) is int for token_id in prompt)
    if row["ok"] and (ids or type(prompt[0]) is list):
        asked = job(prompt=prompt)
        made = build_request(asked, asked.prompts, VOCAB, CONTEXT)  # type: ignore[arg-type]
        assert made.prompts == tuple(map(tuple, asked.prompts))
        assert made.num_choices == (1 if ids else len(prompt))
    elif row["ok"]:
        assert job(prompt=prompt).prompts == prompt
    elif ids:
        error = refusal(job(prompt=prompt), [prompt])
        assert error.code == ErrorCode.INVALID_REQUEST
        assert f"is {prompt[0]}: this model's token ids go from 0 to 511" in error.message
    else:
        with pytest.raises(ValueError, match="prompt"):
            job(prompt=prompt)


@pytest.mark.parametrize(
    ("prompt", "position"), [([512], 0), ([-1, 5], 0), ([5, 5279552648203111001], 1), ([5, 6, -7], 2)]
)
def test_ids_outside_the_vocabulary_are_named(prompt: list[int], position: int) -> None:
    error = refusal(job(), [prompt])
    assert error.code == ErrorCode.INVALID_REQUEST
    assert error.message == (
        f"prompt[{position}] is {prompt[position]}: this model's token ids go from 0 to 511"
    )


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"stop_token_ids": [2, 512]}, "stop_token_ids[1] is 512"),
        ({"allowed_token_ids": [600, 2]}, "allowed_token_ids[0] is 600"),
        ({"logit_bias": {"5": 1, "512": 1}}, "logit_bias is given for 512"),
        ({"logit_bias": {2**31 - 1: -100}}, f"logit_bias is given for {2**31 - 1}"),
    ],
    ids=str,
)
def test_parameters_about_ids_that_the_model_has_not_are_refused(params: dict[str, Any], named: str) -> None:
    error = refusal(with_params(**params), [[5]])
    assert error.code == ErrorCode.INVALID_REQUEST
    assert error.message == f"{named}: this model's token ids go from 0 to 511"


def test_the_whole_vocabulary_is_accepted() -> None:
    asked = job(
        priority="high",
        params={"stop_token_ids": [0, 511], "allowed_token_ids": [0, 511], "logit_bias": {0: 1, 511: 1}},
    )
    made = build_request(asked, [[0, 511]], VOCAB, CONTEXT)
    assert (made.prompts, made.priority, made.params) == (((0, 511),), 0, asked.params)


def test_barred_words_that_the_model_cannot_write_are_left_out() -> None:
    made = build_request(job(), [[5]], VOCAB, CONTEXT, bad_words=[(5, 511), (5, 512), (600,)])
    assert made.bad_words == ((5, 511),)


def test_an_unseeded_job_gets_a_seed_of_its_own() -> None:
    assert build_request(with_params(seed=0), [[5]], VOCAB, CONTEXT).seed == 0
    seeds = {build_request(job(id=name), [[5]], VOCAB, CONTEXT).seed for name in "abab"}
    assert len(seeds) == 2


def test_a_job_for_another_model_is_refused() -> None:
    check_model(job(), "served")
    check_model(job(model="served"), "served")
    with pytest.raises(RequestError, match="serves served, the job asks for other") as refused:
        check_model(job(model="other"), "served")
    assert refused.value.code == ErrorCode.MODEL_NOT_FOUND
