"""One job over several attempts, both ends of the pipe in this process: whatever is lost, the end is the same.

Attempt 1   Run -> prepare -> add -> step ... Piece -> Held -> log      killed
Attempt 2   Run with what the log holds -> ...                          to the end
"""

from __future__ import annotations

import queue
from collections import defaultdict
from typing import Any

import pytest

from broker.calls import Lease
from engine.dry_run import DryRunEngine, Options
from engine.interface import Delta
from protocol import Job, Result, SamplingParams, TokenEvent, TokenLogprob, decode_event
from worker.child import take_in, to_piece
from worker.frames import HEAD_BYTES, Run, Step, decode_from_model, decode_to_model, encode
from worker.held import CHECKPOINT_TOKENS, Held
from worker.preparation import Inbox, Preparation

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


class Attempt:
    """One attempt at a job, with the log that it finds and leaves."""

    def __init__(self, job: Job, number: int, log: list[bytes]) -> None:
        self.log = list(log)
        self.result: Result | None = None
        self._engine = Telling("words", Options())
        payload = job.encode()
        self._held = Held(Lease(job.id, number, 0, len(log), 1_000, 2_000, payload), log)
        run: Any = decode_to_model(encode(Run(self._held.key, payload, self._held.written))[HEAD_BYTES:])
        inbox: Inbox = queue.SimpleQueue()
        Preparation(self._engine, inbox).run(run)
        begun, refused = take_in(self._engine, inbox, wait=True)
        assert refused == []
        (self._held.begun,) = begun

    def step(self) -> None:
        """One step of the engine, told and logged as a worker does."""
        pieces = [to_piece(delta) for delta in self._engine.step()]
        step = decode_from_model(encode(Step([], pieces, 1, 0, 1))[HEAD_BYTES:])
        assert isinstance(step, Step)
        for piece in step.pieces:
            self._held.add(piece)
        if self._held.complete:
            self.result = self._held.result("succeeded", "m", "w")
            self._take(self._held.take_end("done"))
        elif self._held.due():
            self._take(self._held.take_events())

    def hand_back(self) -> None:
        """What a worker that is told to stop does: everything is logged, the end of the job is not."""
        self._take(self._held.take_events())

    def to_the_end(self) -> Result:
        while self.result is None:
            self.step()
        assert not self._engine.has_work()
        return self.result

    def _take(self, taken: tuple[int, list[bytes]]) -> None:
        first, events = taken
        assert first == len(self.log) + 1, "gap or repeat"
        self.log += events


def make_job(stream: bool) -> Job:
    prompts = [" ".join(f"w{number}" for number in range(length)) for length in LENGTHS]
    return Job(
        id="j", prompt=prompts, stream=stream, params=SamplingParams(n=2, logprobs=0, prompt_logprobs=0)
    )


def assert_log_tells(result: Result, log: list[bytes]) -> None:
    """Joined over a choice the log is the result's choice; a choice ends once and says nothing after."""
    *tokens, end = map(decode_event, log)
    assert end.type == "done"
    by_choice: dict[int, list[TokenEvent]] = defaultdict(list)
    for event in tokens:
        assert isinstance(event, TokenEvent)
        by_choice[event.choice].append(event)
    assert sorted(by_choice) == [choice.index for choice in result.choices]
    for choice in result.choices:
        events = by_choice[choice.index]
        assert "".join(event.text for event in events) == choice.text
        assert [token_id for event in events for token_id in event.token_ids] == choice.token_ids
        assert [one for event in events for one in event.logprobs or ()] == choice.logprobs
        assert [e.prompt_logprobs for e in events if e.prompt_logprobs] == (
            [choice.prompt_logprobs] if choice.prompt_logprobs else []
        )
        reasons = [event.finish_reason for event in events]
        assert reasons == [None] * (len(events) - 1) + [choice.finish_reason]


@pytest.mark.parametrize("stream", [True, False])
def test_an_undisturbed_job(stream: bool) -> None:
    attempt = Attempt(make_job(stream), 1, [])
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
    undisturbed = Attempt(job, 1, []).to_the_end()
    log: list[bytes] = []
    for number, steps in enumerate(kills, start=1):
        killed = Attempt(job, number, log)
        for _ in range(steps):
            killed.step()
        if handed_back:
            killed.hand_back()
        log = killed.log
    last = Attempt(job, len(kills) + 1, log)
    result = last.to_the_end()
    assert result.choices == undisturbed.choices
    assert result.usage == undisturbed.usage
    assert_log_tells(result, last.log)


def test_only_the_end_of_the_job_was_lost() -> None:
    """Every choice had ended: the next attempt makes nothing and ends it."""
    job = make_job(stream=True)
    first = Attempt(job, 1, [])
    undisturbed = first.to_the_end()
    last = Attempt(job, 2, first.log[:-1])
    last.step()
    assert last.result is not None
    assert last.result.choices == undisturbed.choices
    assert len(last.log) == len(first.log)
    assert_log_tells(last.result, last.log)
