"""Exact resume: killed at any token and taken over, a job gives what an undisturbed run gives, token for token.

On the tiny random model in fp32. Every attempt has an engine of its own, as another process would: what the one
decoded the next prefills.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.grammar import Grammars
from engine.loading import load_runner
from engine.prompts import Prompts
from protocol import Choice, Job, Result, SamplingParams
from tests.worker.attempts import Attempt, assert_log_tells

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "The quick brown fox"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SAMPLED = {"temperature": 0.8, "seed": 11, "ignore_eos": True}
GREEDY = {"temperature": 0.0, "ignore_eos": True}
JOBS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled, seeded": SAMPLED,
    "sampled, its seed from its id": {"temperature": 1.2, "ignore_eos": True},
    "penalties and biases": {
        **SAMPLED,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.3,
        "logit_bias": {70: 3.0, 71: -100.0},
        "bad_words": ["e"],
    },
    "log-probabilities": {**SAMPLED, "logprobs": 3, "prompt_logprobs": 2},
    "ends that come when they come": {
        "temperature": 1.0,
        "seed": 3,
        "logit_bias": {2: 4.0},
        "min_tokens": 4,
    },
    "several choices, each with its end": {
        "temperature": 1.0,
        "seed": 3,
        "n": 4,
        "logit_bias": {2: 4.0},
        "logprobs": 0,
    },
    "JSON by a schema": {
        "temperature": 0.7,
        "seed": 2,
        "n": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
    },
    "filters, and what may be drawn": {
        **SAMPLED,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "allowed_token_ids": list(range(60, 120)),
        "stop_token_ids": [61, 62],
        "min_tokens": 4,
        "skip_special_tokens": False,
        "truncate_prompt_tokens": 8,
        "max_completion_tokens": 30,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "a regular expression": {
        "temperature": 1.0,
        "seed": 4,
        "response_format": {"type": "regex", "regex": "([a-f]{3}-){4}[0-9]{5}"},
    },
}
STOPPED = {"stop", "include_stop_str_in_output", "max_tokens"}
"""Parameters of the other tests."""
QUICK = ("penalties and biases", "several choices, each with its end", "JSON by a schema")
PROMPTS = {"one prompt": PROMPT, "a list": [PROMPT, "abc", "x y z " * 6]}
MAX_TOKENS = 40


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For a model so small that a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def open_engine(tiny_model_dir: Path) -> Callable[[], Engine]:
    """An engine that knows nothing of any job; the weights are loaded once."""
    loaded = load_runner(str(tiny_model_dir), dtype="float32", device="cpu", num_kv_blocks=128)
    weights, runner = loaded.weights, loaded.runner
    grammars = Grammars(weights.tokenizer, runner.vocab_size, weights.eos_token_ids)
    return lambda: Engine(
        runner,
        weights.tokenizer,
        Prompts(weights.tokenizer),
        weights.fingerprint,
        weights.eos_token_ids,
        grammars=grammars,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )


def make_job(prompt: str | list[str], stream: bool = True, **params: Any) -> Job:
    return Job(
        id="j", prompt=prompt, stream=stream, params=SamplingParams(**{"max_tokens": MAX_TOKENS, **params})
    )


def interrupted(
    open_engine: Callable[[], Engine], job: Job, dice: random.Random, kills: int
) -> tuple[Result, int]:
    """The result after so many kills at random tokens, and how many attempts it took."""
    log: list[bytes] = []
    for number in range(1, kills + 2):
        attempt = Attempt(open_engine(), job, number, log)
        for _ in range(dice.randint(1, 2 * MAX_TOKENS // kills) if number <= kills else 10_000):
            attempt.step()
            if attempt.result is not None:
                assert_log_tells(attempt.result, attempt.log)
                return attempt.result, number
        if dice.random() < 0.3:
            attempt.hand_back()
        log = attempt.log
    raise AssertionError("no end")


def assert_equal(one: Result, other: Result) -> None:
    """Token for token; log-probabilities, which a batch's shape moves by some 2e-5, nearly."""
    assert one.usage == other.usage
    for mine, its in zip(one.choices, other.choices, strict=True):
        assert (mine.text, mine.token_ids) == (its.text, its.token_ids)
        assert (mine.finish_reason, mine.stop_reason) == (its.finish_reason, its.stop_reason)
        assert told(mine) == [pytest.approx(value, abs=1e-4) for value in told(its)]


def told(choice: Choice) -> list[Any]:
    """Every log-probability of a choice, with the id that it is of."""
    of_prompt = [one for one in choice.prompt_logprobs or () if one is not None]
    return [
        value
        for one in [*of_prompt, *(choice.logprobs or ())]
        for alternative in [one, *one["top_logprobs"]]
        for value in (alternative["token_id"], alternative["logprob"])
    ]


def check(open_engine: Callable[[], Engine], job: Job, seeds: range) -> None:
    undisturbed = Attempt(open_engine(), job, 1, []).to_the_end()
    most = 0
    for seed in seeds:
        dice = random.Random(seed)
        result, attempts = interrupted(open_engine, job, dice, kills=dice.randint(1, 5))
        assert_equal(result, undisturbed)
        most = max(most, attempts)
    assert most > 1, "it was never killed in its middle"


def test_every_parameter_is_in_a_job_that_is_killed() -> None:
    assert {name for params in JOBS.values() for name in params} | STOPPED == set(SamplingParams.model_fields)


@pytest.mark.parametrize("params", QUICK)
def test_a_job_that_is_killed(open_engine: Callable[[], Engine], params: str) -> None:
    check(open_engine, make_job(PROMPT, **JOBS[params]), range(3))


@pytest.mark.long
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "not streamed"])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("params", JOBS)
def test_a_job_that_is_killed_again_and_again(
    open_engine: Callable[[], Engine], params: str, prompt: str, stream: bool
) -> None:
    check(open_engine, make_job(PROMPTS[prompt], stream, **JOBS[params]), range(100, 104))


def text_without_stop(open_engine: Callable[[], Engine]) -> str:
    return Attempt(open_engine(), make_job(PROMPT, **SAMPLED), 1, []).to_the_end().choices[0].text


@pytest.mark.parametrize("shown", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_stop_string_of_which_one_attempt_saw_the_beginning(
    open_engine: Callable[[], Engine], shown: bool
) -> None:
    """Killed before, at and behind every token of it."""
    text = text_without_stop(open_engine)
    stop = text[15:20]
    assert text.index(stop) == 15
    job = make_job(PROMPT, stop=[stop, "never written"], include_stop_str_in_output=shown, **SAMPLED)
    undisturbed = Attempt(open_engine(), job, 1, []).to_the_end()
    assert undisturbed.choices[0].text == text[: 20 if shown else 15]
    assert undisturbed.choices[0].stop_reason == stop
    count = len(undisturbed.choices[0].token_ids)
    for steps in range(max(1, count - 7), count):
        first = Attempt(open_engine(), job, 1, [])
        for _ in range(steps):
            first.step()
        assert first.result is None
        second = Attempt(open_engine(), job, 2, first.log)
        assert_equal(second.to_the_end(), undisturbed)
        assert second.result is not None
        assert_log_tells(second.result, second.log)


def test_neighbours_in_the_batch_change_nothing(open_engine: Callable[[], Engine]) -> None:
    """The new owner runs others beside it, and some are prefilled with it."""
    job = make_job(PROMPT, n=2, **SAMPLED)
    undisturbed = Attempt(open_engine(), job, 1, []).to_the_end()
    first = Attempt(open_engine(), job, 1, [])
    for _ in range(13):
        first.step()
    engine = open_engine()
    for number in range(3):
        other = make_job("y" * (5 + 9 * number), **SAMPLED).model_copy(update={"id": f"other{number}"})
        engine.add(engine.prepare(other))
    engine.step()
    assert_equal(Attempt(engine, job, 2, first.log).to_the_end(), undisturbed)


def test_a_draw_that_depended_on_the_attempt_would_be_seen(open_engine: Callable[[], Engine]) -> None:
    """The comparison can fail: with another seed in the second attempt the texts differ."""
    job = make_job(PROMPT, **SAMPLED)
    undisturbed = Attempt(open_engine(), job, 1, []).to_the_end()
    first = Attempt(open_engine(), job, 1, [])
    for _ in range(10):
        first.step()
    other = make_job(PROMPT, **{**SAMPLED, "seed": 12})
    result = Attempt(open_engine(), other, 2, first.log).to_the_end()
    assert result.choices[0].token_ids[:10] == undisturbed.choices[0].token_ids[:10]
    with pytest.raises(AssertionError):
        assert_equal(result, undisturbed)
