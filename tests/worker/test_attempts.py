"""One job over several attempts, on a dry run: whatever is lost, the end is the same."""

from __future__ import annotations

import pytest

from engine.dry_run import DryRunEngine, Options
from engine.interface import Delta
from protocol import Job, SamplingParams, TokenLogprob
from tests.worker.attempts import Attempt, assert_log_tells
from worker.held import CHECKPOINT_TOKENS

LENGTHS = (3, CHECKPOINT_TOKENS, 2 * CHECKPOINT_TOKENS + 5)
"""Words of the three prompts."""


class Telling(DryRunEngine):
    """A dry run that tells log-probabilities: they say of which choice and place they are."""

    def step(self) -> list[Delta]:
        deltas = super().step()
        for delta in deltas:
            delta.logprobs = [told(delta.choice, token_id) for token_id in delta.token_ids]
            if delta.token_ids == [0] and delta.choice % 2 == 0:
                delta.prompt_logprobs = [None, told(delta.choice, -1)]
        return deltas


def told(choice: int, place: int) -> TokenLogprob:
    return {"token_id": place, "token": f"{choice}:{place}", "logprob": -0.1, "rank": 1, "top_logprobs": []}


def started(job: Job, number: int, log: list[bytes]) -> Attempt:
    return Attempt(Telling("words", Options()), job, number, log)


def make_job(stream: bool) -> Job:
    prompts = [" ".join(f"w{number}" for number in range(length)) for length in LENGTHS]
    return Job(
        id="j", prompt=prompts, stream=stream, params=SamplingParams(n=2, logprobs=0, prompt_logprobs=0)
    )


@pytest.mark.parametrize("stream", [True, False])
def test_an_undisturbed_job(stream: bool) -> None:
    attempt = started(make_job(stream), 1, [])
    result = attempt.to_the_end()
    assert_log_tells(result, attempt.log)
    assert [len(choice.token_ids) for choice in result.choices] == [n for n in LENGTHS for _ in range(2)]
    assert [choice.index for choice in result.choices if choice.prompt_logprobs] == [0, 2, 4]
    assert result.usage is not None
    assert result.usage.prompt_tokens == sum(LENGTHS)
    assert result.usage.completion_tokens == 2 * sum(LENGTHS)
    if not stream:
        assert len(attempt.log) <= 2 * sum(length // CHECKPOINT_TOKENS + 1 for length in LENGTHS) + 1


@pytest.mark.parametrize("handed_back", [False, True])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "kills",
    [
        [0],
        [1],
        [LENGTHS[0] - 1],
        [LENGTHS[0]],
        [LENGTHS[1] - 1],
        [LENGTHS[1]],
        [LENGTHS[1] + 1],
        [LENGTHS[2] - 1],
        [2, 2, 70, 1, 30],
    ],
)
def test_a_killed_job_ends_as_if_undisturbed(stream: bool, kills: list[int], handed_back: bool) -> None:
    job = make_job(stream)
    undisturbed = started(job, 1, []).to_the_end()
    log: list[bytes] = []
    for number, steps in enumerate(kills, start=1):
        killed = started(job, number, log)
        for _ in range(steps):
            killed.step()
        if handed_back:
            killed.hand_back()
        log = killed.log
    last = started(job, len(kills) + 1, log)
    result = last.to_the_end()
    assert result.choices == undisturbed.choices
    assert result.usage == undisturbed.usage
    assert_log_tells(result, last.log)


def test_only_the_end_of_the_job_was_lost() -> None:
    """Every choice had ended: the next attempt makes nothing and ends it."""
    job = make_job(stream=True)
    first = started(job, 1, [])
    undisturbed = first.to_the_end()
    last = started(job, 2, first.log[:-1])
    last.step()
    assert last.result is not None
    assert last.result.choices == undisturbed.choices
    assert len(last.log) == len(first.log)
    assert_log_tells(last.result, last.log)
