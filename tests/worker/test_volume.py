"""Log-probabilities by the hundred thousand: what is refused, and that what is not arrives."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from typing import Any

import pytest

from broker import calls
from broker.queue import Queue
from engine.dry_run import DryRunEngine, Options
from engine.interface import Request
from protocol import ErrorCode, Job, RequestError, SamplingParams, TokenEvent, TokenLogprob, decode_event
from protocol.volume import ALTERNATIVE_BYTES, LOGPROB_BYTES
from tests.worker.harness import result, submit, watch
from worker.frames import Begun, Piece, Run
from worker.held import Held
from worker.preparation import Unfit, prepare
from worker.volume import MOST_PROMPT_BYTES, check_volume


def told(alternatives: int) -> TokenLogprob:
    """A place of a prompt as a model with 151,936 tokens tells it."""
    one: Any = {"token_id": 98765, "token": " token", "logprob": -12.345678329467773}
    return {**one, "rank": 123, "top_logprobs": [one] * alternatives}


@pytest.mark.parametrize(
    ("tokens", "params", "refusal"),
    [
        (100_000, {"prompt_logprobs": 0}, ""),
        (100_000, {"prompt_logprobs": 5}, ""),
        (100_000, {"prompt_logprobs": 20}, "prompt_logprobs is 20 for 100,000 prompt tokens"),
        (100_000, {"n": 128, "logprobs": False}, ""),
        (10, {"logprobs": 20}, ""),
        (10, {"n": 128, "logprobs": 20}, "logprobs is 20 for 512,000 output tokens"),
        (10, {"n": 128, "logprobs": True, "top_logprobs": 20}, "logprobs is 20 for 512,000 output tokens"),
        (10, {"n": 128, "logprobs": 1}, ""),
    ],
)
def test_more_than_can_be_told_is_refused(tokens: int, params: dict[str, Any], refusal: str) -> None:
    request = Request("j", (tuple(range(tokens)),), SamplingParams(**params), 0, (4000,))
    with pytest.raises(RequestError, match=refusal) if refusal else nullcontext():
        check_volume(request)


def test_it_is_refused_before_it_runs() -> None:
    job = Job(id="j", prompt="w " * 50_000, params=SamplingParams(prompt_logprobs=20))
    refused = prepare(DryRunEngine("words", Options()), Run("1:j", b"", []), job)
    assert isinstance(refused, Unfit)
    assert refused.error.code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("alternatives", [0, 1, 5, 20])
def test_the_reckoning_is_near_what_is_written(alternatives: int) -> None:
    reckoned = LOGPROB_BYTES + alternatives * ALTERNATIVE_BYTES
    assert len(json.dumps(told(alternatives), separators=(",", ":"))) == pytest.approx(reckoned, rel=0.25)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_largest_that_is_let_through_reaches_a_watcher(queue: Queue) -> None:
    """It is twice what servers buffer for a subscriber: the watcher is cut off and has it from the log."""
    alternatives = 8
    place = told(alternatives)
    count = MOST_PROMPT_BYTES // len(json.dumps(place, separators=(",", ":")))
    submit(queue, "j", "a prompt")
    events: list[Any] = []
    watcher = threading.Thread(target=lambda: events.extend(watch(queue, "j")[1]))
    watcher.start()
    (lease,) = queue.run(calls.lease(queue.keys, "w", 1, 1, 600_000)).leases
    held = Held(lease, 1)
    held.begin(Begun(held.key, count + 1, 1, 0, True))
    held.add(Piece(held.key, 0, [1], "x", True, "length", prompt_logprobs=[None, *[place] * count]))
    stored = held.result("succeeded", "m", "w")
    first, said = held.take_end("done")
    finish = calls.finish(queue.keys, "w", "j", held.attempt, "succeeded", stored, first, said)
    assert queue.run(finish) == "ok"
    watcher.join(240)
    token, end = events
    assert end.type == "done"
    assert isinstance(token, TokenEvent)
    assert token == decode_event(said[0])
    assert token.prompt_logprobs == [None, *[place] * count] == result(queue, "j").choices[0].prompt_logprobs
