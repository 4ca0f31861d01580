"""A job that ends without an owner: its result has what was logged, and large logs do not hold the server up."""

from __future__ import annotations

from typing import Any

from broker import calls
from broker.clearing import Cleared, What, clear
from broker.keys import Keys
from broker.queue import Queue
from protocol import TokenEvent, encode_token
from tests.broker.steps import Worker, assert_drained, assert_ended_once, events_of, lapse, put

KEYS = Keys()
LOGPROB: Any = {"token_id": 7, "token": ',"logprobs":[', "logprob": -0.5, "rank": 1, "top_logprobs": []}
NASTY = ['a,"logprobs":[', '\\"', "logprobs", ',"', '","prompt_logprobs":[1]}', "\u00e9\n"]


def log(queue: Queue, job_id: str, *events: bytes) -> None:
    """A worker logs that, and is lost."""
    (lease,) = Worker(queue, f"of-{job_id}").lease()
    assert lease.id == job_id
    queue.run(calls.publish(KEYS, lease.worker, job_id, 1, 1, events))
    lapse(queue, job_id)


def test_the_result_has_texts_ids_and_reasons_beside_log_probabilities(queue: Queue) -> None:
    put(queue, "a", run="r")
    events = [
        encode_token(
            "a", seq, 1, seq % 2, text, [seq], None, None, [LOGPROB], [None, LOGPROB] if seq < 3 else None
        )
        for seq, text in enumerate(NASTY, start=1)
    ]
    end = encode_token("a", len(NASTY) + 1, 1, 0, "!", [9], "stop", 'logprobs":[', [LOGPROB])
    log(queue, "a", *events, end)
    assert queue.run(calls.cancel(KEYS, "a")) == ("cancelled", None)
    told = [event for event in events_of(queue, "a") if isinstance(event, TokenEvent)]
    assert all(event.logprobs for event in told)
    result = assert_whole(queue, "a", told)
    ends = [(choice.finish_reason, choice.stop_reason) for choice in result.choices]
    assert ends == [("stop", 'logprobs":['), ("cancelled", None)]
    assert_drained(queue)


def assert_whole(queue: Queue, job_id: str, told: list[TokenEvent]) -> Any:
    """The result has what the log has of each choice."""
    result = queue.run(calls.look(KEYS, job_id)).result
    assert result is not None
    for choice in result.choices:
        of_it = [event for event in told if event.choice == choice.index]
        assert choice.text == "".join(event.text for event in of_it)
        assert choice.token_ids == [token for event in of_it for token in event.token_ids]
    return result


def test_log_probabilities_are_not_looked_at(queue: Queue) -> None:
    """They can be nearly all of a log of 256 MiB."""
    put(queue, "a")
    log(queue, "a", encode_token("a", 1, 1, 0, "so far", [1])[:-1] + b',"logprobs":[no JSON]}')
    queue.run(calls.cancel(KEYS, "a"))
    result = queue.run(calls.look(KEYS, "a")).result
    assert result is not None
    assert result.text == "so far"


def test_a_log_of_many_pieces_is_whole(queue: Queue) -> None:
    put(queue, "a")
    texts = [f"{number} " for number in range(1000)]
    log(queue, "a", *[encode_token("a", seq, 1, 0, text, [seq]) for seq, text in enumerate(texts, start=1)])
    queue.run(calls.cancel(KEYS, "a"))
    assert assert_ended_once(queue, "a", "cancelled").text == "".join(texts)


def test_large_logs_end_a_few_a_call(queue: Queue) -> None:
    """10 MiB each, in five events."""
    put(queue, "a", "b")
    large = b',"logprobs":[' + b"1" * (2 << 20) + b"]}"
    for name in "ab":
        (lease,) = Worker(queue, f"of-{name}").lease()
        for seq in range(1, 6):
            event = encode_token(name, seq, 1, 0, "x", [seq])[:-1] + large
            queue.run(calls.publish(KEYS, lease.worker, name, 1, seq, [event]))
    lapse(queue, "a", "b")
    assert queue.run(clear(KEYS, What(running=True), "leases", "0")) == (Cleared(1, 0), "0")
    assert queue.run(clear(KEYS, What(running=True), "leases", "0")) == (Cleared(1, 0), "")
    assert_drained(queue)
