"""A worker that lost its lease is told so, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from broker import calls
from broker.calls import Lease
from broker.keys import Keys
from broker.queue import Queue
from protocol import TERMINAL_STATES, TerminalState
from tests.broker.steps import (
    LONG_MS,
    Worker,
    assert_drained,
    assert_ended_once,
    end,
    events_of,
    finish_call,
    lapse,
    pending,
    put,
    say,
    snapshot,
    tokens,
)

KEYS = Keys()
ZOMBIE: dict[str, tuple[Callable[[Lease], calls.Call[Any]], Any]] = {
    "publish": (
        lambda old: calls.publish(KEYS, "w1", "a", 1, 3, tokens(old, 3, "z")),
        calls.Published("lost", 0),
    ),
    "renew": (lambda _: calls.renew(KEYS, "w1", LONG_MS, [("a", 1)]), ["lost"]),
    "finish": (lambda old: finish_call(KEYS, old, 2, "xy"), "lost"),
    "finish as dead": (lambda old: finish_call(KEYS, old, 2, state="dead", dead_reason="why"), "lost"),
    "release": (lambda _: calls.release(KEYS, "w1", [calls.Handback("a", 1, True)]), 0),
}


def taken_over(queue: Queue) -> None:
    lapse(queue, "a")
    assert Worker(queue, "w2").lease_one().attempt == 2


def taken_over_and_ended(queue: Queue) -> None:
    lapse(queue, "a")
    assert end(queue, Worker(queue, "w2").lease_one(), 2, "xy", state="failed") == "ok"


def handed_back(queue: Queue) -> None:
    assert queue.run(calls.release(KEYS, "w1", [calls.Handback("a", 1, False)])) == 1


def taken_again_by_itself(queue: Queue) -> None:
    lapse(queue, "a")
    (again,) = queue.run(calls.lease(KEYS, "w1", 2, 1, LONG_MS)).leases
    assert again.attempt == 2


def forgotten(queue: Queue) -> None:
    queue.client.flushall()


FATES = [taken_over, taken_over_and_ended, handed_back, taken_again_by_itself, forgotten]


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("act", ZOMBIE)
def test_a_zombie_is_refused(queue: Queue, act: str, fate: Callable[[Queue], None]) -> None:
    put(queue, "a")
    old = Worker(queue).lease_one()
    say(queue, old, 1, "x", "y")
    fate(queue)
    before = snapshot(queue)
    call, refusal = ZOMBIE[act]
    assert queue.run(call(old)) == refusal
    assert snapshot(queue) == before


@pytest.mark.parametrize("act", [act for act in ZOMBIE if act not in ("renew", "release")])
def test_the_same_attempt_of_another_worker_is_refused(queue: Queue, act: str) -> None:
    """A server that lost its last data grants an attempt once more: its number alone would let both owners speak."""
    put(queue, "a")
    lost = Worker(queue).lease_one()
    queue.client.flushall()
    put(queue, "a")
    now = Worker(queue, "w2").lease_one()
    say(queue, now, 1, "x", "y")
    assert (now.attempt, now.worker) == (lost.attempt, "w2")
    before = snapshot(queue)
    call, refusal = ZOMBIE[act]
    assert queue.run(call(lost)) == refusal
    assert snapshot(queue) == before
    assert end(queue, now, 2, "xy") == "ok"
    assert queue.run(finish_call(KEYS, lost, 2, "xy")) == "lost"
    assert queue.run(finish_call(KEYS, now, 2, "xy")) == "ok"


def test_renew_belongs_to_the_worker_that_holds_the_lease(queue: Queue) -> None:
    put(queue, "a")
    Worker(queue).lease_one()
    assert queue.run(calls.renew(KEYS, "w2", LONG_MS, [("a", 1)])) == ["lost"]
    assert queue.run(calls.release(KEYS, "w2", [calls.Handback("a", 1, False)])) == 0


def test_a_lapsed_lease_that_nobody_took_can_be_renewed(queue: Queue) -> None:
    """A worker that was late by a moment keeps its job; only a new owner ends its rights."""
    put(queue, "a")
    lease = Worker(queue).lease_one()
    lapse(queue, "a")
    assert queue.run(calls.renew(KEYS, "w1", LONG_MS, [("a", 1)])) == ["held"]
    assert Worker(queue, "w2").lease() == []
    assert end(queue, lease) == "ok"
    assert_drained(queue)


def test_a_lease_lapses_by_the_servers_clock(queue: Queue) -> None:
    put(queue, "a")
    Worker(queue).lease_one(lease_ms=60)
    other = Worker(queue, "w2")
    client: Any = queue.client
    started = client.time()
    while not (taken := other.lease()):
        seconds, micros = client.time()
        assert (seconds - started[0]) + (micros - started[1]) / 1e6 < 2.0
    assert (taken[0].attempt, taken[0].leased_ms - taken[0].started_ms >= 60) == (2, True)


def test_the_new_owner_goes_on_behind_the_last_logged_event(queue: Queue) -> None:
    put(queue, "a")
    old = Worker(queue).lease_one()
    say(queue, old, 1, "one ", "two ")
    lapse(queue, "a")
    new = Worker(queue, "w2").lease_one()
    assert (new.attempt, new.crashes, new.logged, new.started_ms) == (2, 0, 2, old.started_ms)
    assert say(queue, new, 3, "three").outcome == "ok"
    assert end(queue, new, 3, "one two three") == "ok"
    assert [event.attempt for event in events_of(queue, "a")] == [1, 1, 2, 2]
    assert_ended_once(queue, "a")
    assert_drained(queue)


@pytest.mark.parametrize("state", sorted(TERMINAL_STATES - {"expired"}))
def test_a_job_that_ended_one_way_does_not_end_another_way(queue: Queue, state: TerminalState) -> None:
    put(queue, "a")
    lease = Worker(queue).lease_one()
    other: TerminalState = "failed" if state == "succeeded" else "succeeded"
    assert end(queue, lease, state=state) == "ok"
    before = snapshot(queue)
    assert end(queue, lease, state=other) == "lost"
    assert snapshot(queue) == before


def test_a_gap_is_refused_and_mended(queue: Queue) -> None:
    """What a server lost of the log is sent again from there on."""
    put(queue, "a")
    lease = Worker(queue).lease_one()
    assert say(queue, lease, 1, "x", "y", "z") == calls.Published("ok", 3)
    queue.client.ltrim(KEYS.log("a"), 0, 0)
    assert say(queue, lease, 4, "!") == calls.Published("gap", 1)
    assert end(queue, lease, 3, "xyz") == "gap"
    assert queue.run(calls.look(KEYS, "a")).state == "running"
    assert say(queue, lease, 2, "y", "z") == calls.Published("ok", 3)
    assert end(queue, lease, 3, "xyz") == "ok"
    assert_ended_once(queue, "a")


def test_pending_entries_follow_the_lease(queue: Queue) -> None:
    """People who watch with XPENDING see each leased entry at its owner, delivered once."""
    put(queue, "a", "b")
    first = Worker(queue).lease(2)
    stream = KEYS.jobs("normal", "default")
    lapse(queue, "a")
    second = Worker(queue, "w2").lease_one()
    client: Any = queue.client
    queue.run(calls.renew(KEYS, "w1", LONG_MS, [("b", 1)]))
    owners = {
        (entry["consumer"], entry["times_delivered"])
        for entry in client.xpending_range(stream, "workers", "-", "+", 9)
    }
    assert owners == {(b"w1", 1), (b"w2", 1)}
    assert pending(queue, stream) == 2
    end(queue, second)
    end(queue, first[1])
    assert client.exists(stream) == 0
    assert_drained(queue)
