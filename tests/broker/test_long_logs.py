"""A job that nobody holds and whose log is too long for one script: a worker is granted it, told why, and ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fakeredis
import pytest
import redis

from broker import calls
from broker.calls import Handback
from broker.clearing import Cleared, What
from broker.keys import Keys
from broker.queue import Queue
from protocol import encode_token
from tests.broker.steps import (
    LONG_MS,
    Worker,
    assert_drained,
    assert_ended_once,
    clear,
    counts,
    end,
    hear,
    lapse,
    put,
    snapshot,
)

KEYS = Keys()
LONG = 6000
"""Events: more than a script reads of one job."""


def write(queue: Queue, job_id: str, events: int = LONG, large: bytes = b"") -> None:
    """A worker logs that much, and is lost."""
    lease = Worker(queue, f"of-{job_id}").lease_one()
    assert lease.id == job_id
    for first in range(1, events + 1, 1000):
        part = range(first, min(first + 1000, events + 1))
        said = [encode_token(job_id, seq, 1, 0, "x", [seq])[:-1] + large + b"}" for seq in part]
        queue.run(calls.publish(KEYS, lease.worker, job_id, 1, first, said))
    lapse(queue, job_id)


def handed_back(queue: Queue, job_id: str, retry_in_ms: int = 0) -> None:
    write(queue, job_id)
    queue.run(calls.release(KEYS, f"of-{job_id}", [Handback(job_id, 1, retry_in_ms=retry_in_ms)]))


PLACES: dict[str, Callable[[Queue, str], None]] = {
    "lapsed": write,
    "handed back": handed_back,
    "tried again": lambda queue, job_id: handed_back(queue, job_id, 3_600_000),
}


def overdue(queue: Queue, job_id: str) -> None:
    client: Any = queue.client
    client.hset(KEYS.job(job_id), "deadline", 1)
    client.zadd(KEYS.deadlines, {job_id: 1})


@pytest.mark.parametrize("place", PLACES)
def test_a_cancelled_one_is_marked_and_ended_by_who_is_granted_it(queue: Queue, place: str) -> None:
    client: Any = queue.client
    put(queue, "a", run="r")
    PLACES[place](queue, "a")
    for _ in range(2):
        assert queue.run(calls.cancel(KEYS, "a")) == ("cancelling", None)
    told = client.pubsub()
    told.subscribe(KEYS.control)
    assert hear(told, 1, 0.2) == []
    lease = Worker(queue, "w2").lease_one()
    assert hear(told, 1) == ["cancel:a"]
    told.close()
    assert (lease.attempt, lease.logged) == (2, LONG)
    assert queue.run(calls.renew(KEYS, "w2", LONG_MS, [("a", 2)])) == ["cancel"]
    assert end(queue, lease, LONG, "x" * LONG, state="cancelled") == "ok"
    assert_ended_once(queue, "a", "cancelled")
    assert_drained(queue)


@pytest.mark.parametrize(
    "script",
    ["lease", *(pytest.param(name, marks=pytest.mark.long) for name in ("heartbeat", "look", "cancel"))],
)
@pytest.mark.parametrize("place", PLACES)
def test_an_overdue_one_is_granted_with_its_deadline(queue: Queue, place: str, script: str) -> None:
    run: dict[str, Callable[[], object]] = {
        "lease": lambda: None,
        "heartbeat": lambda: queue.run(calls.heartbeat(KEYS, "w9", {})),
        "look": lambda: queue.run(calls.look(KEYS, "a")),
        "cancel": lambda: queue.run(calls.cancel(KEYS, "a")),
    }
    put(queue, "a", deadline_in_s=3600.0)
    PLACES[place](queue, "a")
    overdue(queue, "a")
    run[script]()
    lease = Worker(queue, "w2").lease_one()
    assert lease.deadline_ms == 1
    assert end(queue, lease, LONG, "x" * LONG, state="expired") == "ok"
    assert_ended_once(queue, "a", "expired")
    assert_drained(queue)


def test_a_marked_one_that_is_handed_back_or_lost_goes_to_the_next(queue: Queue) -> None:
    put(queue, "a")
    write(queue, "a")
    lease = Worker(queue, "w2").lease_one()
    assert queue.run(calls.cancel(KEYS, "a")) == ("cancelling", None)
    assert queue.run(calls.release(KEYS, "w2", [Handback("a", lease.attempt, retry_in_ms=60_000)])) == 1
    assert Worker(queue, "w3").lease_one().attempt == 3
    lapse(queue, "a")
    lease = Worker(queue, "w4").lease_one()
    assert end(queue, lease, LONG, "x" * LONG, state="cancelled") == "ok"
    assert_ended_once(queue, "a", "cancelled")
    assert_drained(queue)


def test_log_probabilities_count_too(queue: Queue) -> None:
    """20 MiB of them in ten events."""
    put(queue, "a")
    write(queue, "a", 10, b',"logprobs":[' + b"1" * (2 << 20) + b"]")
    assert queue.run(calls.cancel(KEYS, "a")) == ("cancelling", None)
    assert Worker(queue, "w2").lease_one().logged == 10


def test_clearing_marks_it_once(queue: Queue) -> None:
    put(queue, "a", "b")
    write(queue, "a")
    assert clear(queue, What(running=True)) == Cleared(1, 1)
    assert Worker(queue, "w2").lease_one().id == "a"


def test_one_that_somebody_spoilt_ends_without_a_text(queue: Queue) -> None:
    """No worker could take it."""
    put(queue, "a")
    write(queue, "a")
    queue.client.hset(KEYS.job("a"), "about", "nonsense")
    assert Worker(queue, "w2").lease() == []
    result = queue.run(calls.look(KEYS, "a")).result
    assert result is not None
    assert (result.state, result.choices) == ("dead", [])
    assert counts(queue) == (0, 0)


def test_nothing_is_told_before_the_mark_of_a_full_server(queue: Queue) -> None:
    put(queue, "a")
    write(queue, "a")
    before = snapshot(queue)
    queue.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.OutOfMemoryError):
            queue.run(calls.cancel(KEYS, "a"))
        assert snapshot(queue) == before
    finally:
        queue.client.config_set("maxmemory", 0)


def test_a_script_reads_nothing_of_what_it_leaves(queue: Queue) -> None:
    """However long the log is, it costs the others nothing: these are all the commands that are run."""
    put(queue, "a")
    write(queue, "a")
    client: Any = queue.client
    client.config_resetstat()
    queue.run(calls.cancel(KEYS, "a"))
    overdue(queue, "a")
    queue.run(calls.look(KEYS, "a"))
    queue.run(calls.heartbeat(KEYS, "w9", {}))
    assert Worker(queue, "w2").lease_one().logged == LONG
    assert "cmdstat_lrange" not in client.info("commandstats")


def test_on_the_imitation_too(fake_redis: fakeredis.FakeRedis) -> None:
    queue = Queue(fake_redis, KEYS)
    put(queue, "a")
    write(queue, "a")
    assert queue.run(calls.cancel(KEYS, "a")) == ("cancelling", None)
    lease = Worker(queue, "w2").lease_one()
    assert end(queue, lease, LONG, "x" * LONG, state="cancelled") == "ok"
    assert_ended_once(queue, "a", "cancelled")
    assert_drained(queue)
