"""A call whose reply was lost is sent again by redis-py: the second run answers as the first and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fakeredis
import pytest

from broker import calls
from broker.calls import Call, Lease
from broker.keys import Keys
from broker.loading import leave, note_loading
from broker.queue import Queue
from tests.broker.steps import (
    LONG_MS,
    MODEL,
    Worker,
    assert_drained,
    assert_ended_once,
    end,
    events_of,
    finish_call,
    hear,
    job,
    key_names,
    log_text,
    put,
    say,
    snapshot,
    tokens,
)

KEYS = Keys()


def twice(queue: Queue, call: Call[Any]) -> tuple[Any, Any]:
    """The answers of two runs; what the server holds must not change between them, renewed times excepted."""
    first = queue.run(call)
    before = snapshot(queue)
    second = queue.run(call)
    after = snapshot(queue)
    for held in (before, after):
        for told in (queue.keys.workers, queue.keys.loading):
            held.pop(told.encode(), None)
        held[b"leased"] = sorted(name for name, _ in held.pop(queue.keys.leases.encode(), []))
    assert after == before
    return first, second


def unlogged(queue: Queue) -> Lease:
    put(queue, "a", run="r")
    return Worker(queue).lease_one()


def leased(queue: Queue) -> Lease:
    lease = unlogged(queue)
    say(queue, lease, 1, "x", "y")
    return lease


SAME_ANSWER: dict[str, Callable[[Queue], Call[Any]]] = {
    "renew": lambda queue: calls.renew(KEYS, "w1", LONG_MS, [("a", leased(queue).attempt), ("nobody", 1)]),
    "publish": lambda queue: calls.publish(KEYS, "w1", "a", 1, 3, tokens(leased(queue), 3, "z", "!")),
    "publish some of it again": lambda queue: calls.publish(
        KEYS, "w1", "a", 1, 2, tokens(leased(queue), 2, "y", "z")
    ),
    "publish beyond a gap": lambda queue: calls.publish(KEYS, "w1", "a", 1, 9, tokens(leased(queue), 9, "z")),
    "publish nothing": lambda queue: calls.publish(KEYS, "w1", "a", leased(queue).attempt, 3, []),
    "finish": lambda queue: finish_call(KEYS, leased(queue), 2, "xy"),
    "finish without a log": lambda queue: calls.finish(
        KEYS, "w1", "a", unlogged(queue).attempt, "succeeded", b"{}", 0, [b"{}"]
    ),
    "finish as dead": lambda queue: finish_call(
        KEYS, leased(queue), 2, "xy", state="dead", dead_reason="why"
    ),
    "finish beyond a gap": lambda queue: finish_call(KEYS, leased(queue), 7),
    "loading": lambda _: note_loading(KEYS, "w1", "m"),
    "leave": lambda queue: (queue.run(calls.register(KEYS, "w1", MODEL)), leave(KEYS, "w1"))[1],
    "register": lambda _: calls.register(KEYS, "w1", MODEL),
    "look": lambda queue: calls.look(KEYS, leased(queue).id),
}


@pytest.mark.parametrize("name", SAME_ANSWER)
def test_again_is_once(queue: Queue, name: str) -> None:
    first, second = twice(queue, SAME_ANSWER[name](queue))
    assert second == first


def test_many_jobs_are_told_of_in_one_call_and_answered_one_by_one(queue: Queue) -> None:
    put(queue, "a", "b", "c", "d")
    a, b, c, d = Worker(queue).lease(4)
    queue.run(calls.cancel(KEYS, "b"))
    assert end(queue, d) == "ok"
    news = [
        calls.News("a", a.attempt, 1, tokens(a, 1, "x", "y")),
        calls.News("b", b.attempt, 1, tokens(b, 1, "z")),
        calls.News("c", c.attempt, 2, tokens(c, 2, "z")),
        calls.News("d", d.attempt, 2, tokens(d, 2, "z")),
    ]
    first, second = twice(queue, calls.publish_all(KEYS, "w1", news))
    said = [(one.outcome, one.logged) for one in first]
    assert said == [("ok", 2), ("cancel", 1), ("gap", 0), ("lost", 0)]
    assert second == first
    assert log_text(queue, "a") == "xy"


def test_a_job_may_have_more_events_than_lua_unpacks(queue: Queue) -> None:
    put(queue, "a", "b")
    a, b = Worker(queue).lease(2)
    texts = ["x"] * 20_000
    assert queue.run(calls.publish(KEYS, "w1", "a", 1, 1, tokens(a, 1, *texts))).logged == 20_000
    assert queue.run(calls.publish(KEYS, "w1", "a", 1, 2, tokens(a, 2, *texts))).logged == 20_001
    assert queue.run(calls.finish(KEYS, "w1", "b", 1, "succeeded", b"{}", 1, tokens(b, 1, *texts))) == "ok"
    assert [queue.client.llen(KEYS.log(name)) for name in ("a", "b")] == [20_001, 20_000]


def test_submit_again_is_the_same_job(queue: Queue) -> None:
    first, second = twice(queue, calls.submit(KEYS, job("a")))
    assert (first.outcome, second.outcome, second.state) == ("queued", "same", "queued")


def test_lease_again_is_the_same_lease(queue: Queue) -> None:
    put(queue, "a", "b", "c")
    first, second = twice(queue, calls.lease(KEYS, "w1", 1, 2, LONG_MS))
    assert [(lease.id, lease.attempt) for lease in first.leases] == [("a", 1), ("b", 1)]
    assert [lease.payload for lease in second.leases] == [lease.payload for lease in first.leases]
    assert [(lease.id, lease.attempt, lease.started_ms) for lease in second.leases] == [
        (lease.id, lease.attempt, lease.started_ms) for lease in first.leases
    ]


def test_lease_again_leaves_out_what_is_no_longer_held(queue: Queue) -> None:
    put(queue, "a", "b", "c")
    worker = Worker(queue)
    kept, ended, released = worker.lease(3)
    assert end(queue, ended) == "ok"
    queue.run(calls.release(KEYS, "w1", [calls.Handback(released.id, released.attempt, False)]))
    again = queue.run(calls.lease(KEYS, "w1", worker.requests, 3, LONG_MS)).leases
    assert [lease.id for lease in again] == [kept.id]


def test_an_empty_lease_again_may_grant_what_came_since(queue: Queue) -> None:
    call = calls.lease(KEYS, "w1", 1, 1, LONG_MS)
    assert queue.run(call) == calls.Leased([], None)
    put(queue, "a")
    assert [lease.id for lease in queue.run(call).leases] == ["a"]
    assert [lease.id for lease in queue.run(call).leases] == ["a"]


def test_a_lease_of_the_same_number_by_another_worker_is_its_own(queue: Queue) -> None:
    put(queue, "a", "b")
    assert [lease.id for lease in queue.run(calls.lease(KEYS, "w1", 1, 1, LONG_MS)).leases] == ["a"]
    assert [lease.id for lease in queue.run(calls.lease(KEYS, "w2", 1, 1, LONG_MS)).leases] == ["b"]


@pytest.mark.parametrize("crashed", [False, True])
def test_release_again_changes_nothing(queue: Queue, crashed: bool) -> None:
    lease = leased(queue)
    assert twice(queue, calls.release(KEYS, "w1", [calls.Handback("a", lease.attempt, crashed)])) == (1, 0)
    next_lease = Worker(queue, "w2").lease_one()
    assert (next_lease.attempt, next_lease.crashes, next_lease.logged) == (2, int(crashed), 2)


def test_cancel_again_changes_nothing(queue: Queue) -> None:
    put(queue, "waits")
    assert twice(queue, calls.cancel(KEYS, "waits")) == (("cancelled", None), ("ended", "cancelled"))
    leased(queue)
    assert twice(queue, calls.cancel(KEYS, "a")) == (("cancelling", None), ("cancelling", None))
    assert twice(queue, calls.cancel(KEYS, "nobody")) == (("unknown", None), ("unknown", None))


def test_forget_again_changes_nothing(queue: Queue) -> None:
    end(queue, leased(queue), 2, "xy")
    client: Any = queue.client
    ((entry, _),) = client.xrange(KEYS.done("r"))
    call = calls.forget(KEYS, "r", [("a", entry.decode())])
    assert twice(queue, call) == (1, 0)
    assert key_names(queue) == {KEYS.meta, KEYS.done("r"), KEYS.lease("w1")}


def test_forget_leaves_a_job_that_has_not_ended(queue: Queue) -> None:
    lease = leased(queue)
    assert queue.run(calls.forget(KEYS, "r", [("a", "1-1")])) == 0
    assert end(queue, lease, 2, "xy") == "ok"
    assert_ended_once(queue, "a")


def test_heartbeat_again_changes_nothing(queue: Queue) -> None:
    queue.run(calls.register(KEYS, "w1", MODEL))
    assert twice(queue, calls.heartbeat(KEYS, "w1", {"slots": 4})) == ("ok", "ok")


def test_nothing_is_heard_twice(queue: Queue) -> None:
    """Repetitions publish nothing: a watcher that only listens hears each event once."""
    put(queue, "a")
    lease = Worker(queue).lease_one()
    with queue.client.pubsub() as channel:
        channel.subscribe(KEYS.tokens("a"))
        assert hear(channel, 1, timeout_s=0.05) == []
        for _ in range(2):
            say(queue, lease, 1, "x", "y")
            say(queue, lease, 2, "y", "z")
        for _ in range(2):
            end(queue, lease, 3, "xyz")
        heard = hear(channel, 4) + hear(channel, 1, timeout_s=0.05)
    assert [f'"seq":{seq}' in event for seq, event in enumerate(heard, start=1)] == [True] * 4
    assert len(heard) == len(events_of(queue, "a")) == 4


def test_the_whole_way_on_the_imitation_too(fake_redis: fakeredis.FakeRedis) -> None:
    """What unit tests elsewhere rely on: fakeredis agrees on the plain way of a job."""
    queue = Queue(fake_redis, KEYS)
    put(queue, "a")
    lease = Worker(queue).lease_one()
    assert say(queue, lease, 1, "x").outcome == "ok"
    assert end(queue, lease, 1, "x") == "ok"
    assert end(queue, lease, 1, "x") == "ok"
    assert_ended_once(queue, "a")
    assert_drained(queue)


def test_a_request_that_comes_late_is_granted_nothing(queue: Queue) -> None:
    """A server that stood still may read the connection that was given up last."""
    put(queue, "a", "b", "c")
    first, second = (calls.lease(KEYS, "w1", number, 1, LONG_MS) for number in (9, 10))
    assert [len(queue.run(call).leases) for call in (first, second)] == [1, 1]
    assert queue.run(first).leases == []
    assert [lease.id for lease in queue.run(second).leases] == ["b"]
    assert [lease.id for lease in queue.run(calls.lease(KEYS, "w1", 11, 1, LONG_MS)).leases] == ["c"]
