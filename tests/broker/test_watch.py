"""Whoever follows a job gets exactly its text, once, and an end, however late, slow or cut off."""

from __future__ import annotations

import time
from typing import Any

import pytest

import broker.watch
from broker import calls
from broker.connection import connect
from broker.queue import Queue
from broker.watch import Replay
from protocol import Choice, JobNotFound, Result, TokenEvent, encode_terminal, encode_token
from tests.broker.steps import Worker, assert_ended_once, end, put, say, tokens
from tests.broker.watchers import KEYS, TEXT, WORDS, Watch, Watcher, cut_subscriptions, started
from tests.servers import RealServer

IN_TIME_S = 2.0
"""A watcher learns of an end no later than this, in every case."""


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that looks again after 0.1 s without a message, not after the whole time it is given."""
    assert broker.watch.SILENCE_S <= IN_TIME_S
    monkeypatch.setattr(broker.watch, "SILENCE_S", 0.1)


def test_from_before_the_start(queue: Queue, watch: Watch) -> None:
    lease = started(queue)
    watcher = watch("a")
    for seq, word in enumerate(WORDS, start=1):
        say(queue, lease, seq, word)
        assert watcher.take(1)[-1].text == word
    end(queue, lease, 20, TEXT)
    watcher.rest()
    watcher.assert_whole()


def test_after_the_end(queue: Queue, watch: Watch) -> None:
    lease = started(queue)
    say(queue, lease, 1, *WORDS)
    end(queue, lease, 20, TEXT)
    began = time.monotonic()
    watcher = watch("a")
    watcher.rest()
    assert time.monotonic() - began < 1.0
    watcher.assert_whole()


def test_from_half_way(queue: Queue, watch: Watch) -> None:
    lease = started(queue)
    say(queue, lease, 1, *WORDS[:5])
    watcher = watch("a")
    assert len(watcher.take(5)) == 5
    say(queue, lease, 6, *WORDS[5:])
    end(queue, lease, 20, TEXT)
    watcher.rest()
    watcher.assert_whole()


def test_two_watchers_one_of_which_leaves(queue: Queue, watch: Watch) -> None:
    lease = started(queue)
    stays, leaves = watch("a"), watch("a")
    say(queue, lease, 1, *WORDS[:5])
    stays.take(3)
    leaves.take(3)
    leaves.leave()
    say(queue, lease, 6, *WORDS[5:])
    end(queue, lease, 20, TEXT)
    stays.rest()
    stays.assert_whole()
    assert_ended_once(queue, "a")


def test_nobody_watches(queue: Queue) -> None:
    lease = started(queue)
    assert say(queue, lease, 1, *WORDS).outcome == "ok"
    assert end(queue, lease, 20, TEXT) == "ok"
    assert assert_ended_once(queue, "a").text == TEXT


def test_a_subscription_cut_in_the_middle(queue: Queue, watch: Watch) -> None:
    """What was said while nobody was subscribed is read from the log."""
    lease = started(queue)
    watcher = watch("a")
    say(queue, lease, 1, *WORDS[:5])
    watcher.take(3)
    assert cut_subscriptions(queue) == 1
    say(queue, lease, 6, *WORDS[5:10])
    watcher.take(5)
    assert cut_subscriptions(queue) == 1
    say(queue, lease, 11, *WORDS[10:])
    end(queue, lease, 20, TEXT)
    began = time.monotonic()
    watcher.rest()
    assert time.monotonic() - began < IN_TIME_S
    watcher.assert_whole()


@pytest.mark.usefixtures("short_silence", "keys_broken_by_hand")
def test_live_messages_that_never_came(queue: Queue, watch: Watch) -> None:
    """A server may drop messages without closing anything: the next one shows the gap, and silence is not the end."""
    lease = started(queue)
    watcher = watch("a")
    say(queue, lease, 1, WORDS[0])
    watcher.take(1)
    client: Any = queue.client
    client.rpush(KEYS.log("a"), *tokens(lease, 2, *WORDS[1:19]))
    say(queue, lease, 20, WORDS[19])
    watcher.take(5)
    result = Result(id="a", state="succeeded", choices=[Choice(text=TEXT, token_ids=[1])]).encode()
    client.hset(KEYS.job("a"), "state", "succeeded")
    client.set(KEYS.result("a"), result)
    client.rpush(KEYS.log("a"), b'{"type":"done","id":"a","seq":21,"attempt":1}')
    watcher.rest()
    watcher.assert_whole()


def test_another_worker_goes_on(queue: Queue, watch: Watch) -> None:
    lease = started(queue)
    watcher = watch("a")
    say(queue, lease, 1, *WORDS[:5])
    watcher.take(5)
    queue.run(calls.release(KEYS, "w1", [calls.Handback("a", 1, False)]))
    second = Worker(queue, "w2").lease_one()
    say(queue, second, 6, *WORDS[5:])
    end(queue, second, 20, TEXT)
    watcher.rest()
    watcher.assert_whole()
    assert [event.attempt for event in watcher.events] == [1] * 5 + [2] * 16


def test_an_end_without_a_log_is_told_from_the_result(queue: Queue, watch: Watch) -> None:
    """Nobody was expected to stream the job: its terminal event is published, not logged."""
    lease = started(queue)
    stored = Result(
        id="a", state="succeeded", choices=[Choice(text="xyz", token_ids=[1, 2, 3], finish_reason="stop")]
    )
    last = encode_terminal("a", 2, lease.attempt, "done")
    fence = (KEYS, lease.worker, "a", lease.attempt)
    assert queue.run(calls.finish(*fence, "succeeded", stored.encode(), 0, [last])) == "ok"
    assert Replay("a").hear({"type": "message", "data": last}) is None, "it is told that something is missing"
    watcher = watch("a")
    watcher.rest()
    watcher.assert_whole("xyz")
    assert queue.client.exists(KEYS.log("a")) == 0


@pytest.mark.parametrize("seen", [0, 5, 20])
def test_a_log_that_is_gone_is_made_good_from_the_result(queue: Queue, watch: Watch, seen: int) -> None:
    lease = started(queue)
    watcher = watch("a")
    say(queue, lease, 1, *WORDS)
    watcher.take(seen)
    cut_subscriptions(queue)
    end(queue, lease, 20, TEXT)
    queue.client.delete(KEYS.log("a"))
    if seen:
        # What it had already received it hands on; then its subscription is found cut.
        watcher.rest()
    else:
        watcher = watch("a")
        watcher.rest()
    watcher.assert_whole()
    ids = [token for event in watcher.events if isinstance(event, TokenEvent) for token in event.token_ids]
    assert ids == list(range(1, 21))


def test_a_finished_choice_is_not_finished_again() -> None:
    """From the result only what is missing: a choice that ended says nothing more."""
    replay = Replay("a")
    replay.catch_up(
        [
            b'{"type":"token","id":"a","seq":1,"attempt":1,"choice":0,"text":"x","token_ids":[7],"finish_reason":"stop"}',
            b'{"type":"token","id":"a","seq":2,"attempt":1,"choice":1,"text":"y","token_ids":[8]}',
        ]
    )
    choices = [
        Choice(index=0, text="x", token_ids=[7], finish_reason="stop"),
        Choice(index=1, text="yz", token_ids=[8, 9], finish_reason="length"),
    ]
    rest: list[Any] = replay.from_result(Result(id="a", state="succeeded", choices=choices))
    assert [event.type for event in rest] == ["token", "done"]
    assert (rest[0].choice, rest[0].text, rest[0].token_ids, rest[0].finish_reason) == (1, "z", [9], "length")


def test_log_probabilities_are_told_once_each() -> None:
    """Also where the rest comes from the result: those of the prompt with a choice's first tokens."""
    one: Any = {"token_id": 7, "token": "x", "logprob": -0.5, "rank": 1, "top_logprobs": []}
    replay = Replay("a")
    replay.catch_up([encode_token("a", 1, 1, 0, "x", [7], None, None, [one], [None, one])])
    choices = [
        Choice(index=index, text="xy", token_ids=[7, 8], logprobs=[one, one], prompt_logprobs=told)
        for index, told in enumerate(([None, one], None, [None, one]))
    ]
    rest: list[Any] = replay.from_result(Result(id="a", state="succeeded", choices=choices))
    assert [(event.logprobs, event.prompt_logprobs) for event in rest[:-1]] == [
        ([one], None),
        ([one, one], None),
        ([one, one], [None, one]),
    ]


@pytest.mark.parametrize("fate", ["never submitted", "expired", "its end is gone"])
def test_an_unknown_job_is_said_at_once(queue: Queue, watch: Watch, fate: str) -> None:
    if fate == "expired":
        put(queue, "a", result_ttl_s=0.001)
        end(queue, Worker(queue).lease_one())
        client: Any = queue.client
        while client.exists(KEYS.job("a")):
            pass
    if fate == "its end is gone":
        put(queue, "a")
        end(queue, Worker(queue).lease_one())
        queue.client.delete(KEYS.log("a"), KEYS.result("a"))
    began = time.monotonic()
    with pytest.raises(JobNotFound, match="job a: not found"):
        watch("a").take(1)
    assert time.monotonic() - began < 1.0


@pytest.mark.usefixtures("short_silence")
def test_a_job_that_vanishes_under_its_watcher(queue: Queue, watch: Watch) -> None:
    lease = started(queue)
    say(queue, lease, 1, *WORDS[:2])
    watcher = watch("a")
    watcher.take(2)
    queue.client.flushall()
    with pytest.raises(JobNotFound):
        watcher.rest()


@pytest.mark.parametrize("state", ["failed", "dead", "cancelled"])
def test_every_kind_of_end_is_told(queue: Queue, watch: Watch, state: str) -> None:
    lease = started(queue)
    end(queue, lease, state=state)
    kind = {"failed": "error"}.get(state, state)
    live, late = watch("a"), watch("a")
    live.rest()
    live.assert_whole("", kind)
    queue.client.delete(KEYS.log("a"))
    late.rest()
    assert late.events[-1].type == kind


def test_a_waiting_job_that_is_cancelled(queue: Queue, watch: Watch) -> None:
    put(queue, "a")
    watcher = watch("a")
    queue.run(calls.cancel(KEYS, "a"))
    watcher.rest()
    watcher.assert_whole("", "cancelled")
    assert watcher.events[-1].code == "cancelled"


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_a_watcher_too_slow_for_the_server(fresh_server: RealServer, kind: str) -> None:
    """The server cuts off a subscriber whose buffer overflows; what it missed stands in the log."""
    queue = Queue(connect(fresh_server.url), KEYS)
    queue.client.config_set("client-output-buffer-limit", "pubsub 65536 0 0")
    lease = started(queue)
    watcher = Watcher(fresh_server.url, kind, "a")
    say(queue, lease, 1, "first ")
    watcher.take(1)
    words = [f"{n:08d}" * 100 for n in range(3000)]
    for start in range(0, 3000, 250):
        say(queue, lease, start + 2, *words[start : start + 250])
    text = "first " + "".join(words)
    end(queue, lease, 3001, text)
    watcher.rest()
    watcher.assert_whole(text)
    watcher.close()
    queue.close()
