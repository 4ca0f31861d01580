"""The check for leaked keys finds each kind of leak, and only those."""

from __future__ import annotations

from typing import Any

import fakeredis
import pytest

from broker import calls
from broker.keys import Keys
from broker.queue import Queue
from tests.broker.steps import Worker, end, job, put, say
from tests.leaks import assert_nothing_leaked, leaked_keys

KEYS = Keys()


@pytest.fixture
def queue(fake_redis: fakeredis.FakeRedis) -> Queue:
    """A job in every state: waiting, running, ended and kept until deleted, ended and expiring."""
    queue = Queue(fake_redis, KEYS)
    worker = Worker(queue)
    for job_id, ttl in [("kept", 0), ("ended", 60), ("running", 60), ("waiting", 60)]:
        put(queue, job_id, result_ttl_s=ttl, run=None if job_id == "ended" else "r")
    for lease in worker.lease(3):
        say(queue, lease, 1, "x")
        if lease.id != "running":
            end(queue, lease, 1, "x")
    queue.run(calls.heartbeat(KEYS, "w1", {}))
    return queue


def test_jobs_in_every_state_leak_nothing(queue: Queue) -> None:
    assert_nothing_leaked(queue.client)


@pytest.mark.parametrize(
    "key", [KEYS.job("ended"), KEYS.log("ended"), KEYS.result("ended"), KEYS.lease("w1")]
)
def test_an_expiry_that_was_forgotten_is_found(queue: Queue, key: str) -> None:
    assert queue.client.persist(key)
    assert leaked_keys(queue.client) == [key]
    with pytest.raises(AssertionError, match="1 keys have no expiry"):
        assert_nothing_leaked(queue.client)


def test_what_a_job_left_where_waiting_and_running_ones_stand_is_found(queue: Queue) -> None:
    client: Any = queue.client
    client.zadd(KEYS.leases, {"ended": 1})
    client.zadd(KEYS.base + "deadlines", {"ended": 1})
    client.zadd(KEYS.tenants("low"), {"gone": 1})
    client.rpush(KEYS.log("never-submitted"), "x")
    client.set(KEYS.base + "something", "new")
    assert leaked_keys(client) == sorted(
        [
            KEYS.leases,
            KEYS.base + "deadlines",
            KEYS.tenants("low"),
            KEYS.log("never-submitted"),
            KEYS.base + "something",
        ]
    )


def test_a_stream_without_entries_is_found(queue: Queue) -> None:
    client: Any = queue.client
    entry = client.xadd(KEYS.jobs("low", "t"), {"id": "x"})
    client.xdel(KEYS.jobs("low", "t"), entry)
    assert leaked_keys(client) == [KEYS.jobs("low", "t")]


def test_a_stream_whose_jobs_have_all_ended_is_found(queue: Queue) -> None:
    """And the tenant that is said to have work in it."""
    put(queue, "one", "two", tenant="t", priority="low")
    assert_nothing_leaked(queue.client)
    client: Any = queue.client
    client.hset(KEYS.job("one"), "state", "succeeded")
    client.expire(KEYS.job("one"), 60)
    assert leaked_keys(client) == []
    client.hset(KEYS.job("two"), "state", "cancelled")
    client.expire(KEYS.job("two"), 60)
    assert leaked_keys(client) == [KEYS.jobs("low", "t"), KEYS.tenants("low")]


def test_every_queue_of_the_server_is_looked_at(queue: Queue) -> None:
    other = Queue(queue.client, Keys("other"))
    other.run(calls.submit(other.keys, job("a")))
    assert_nothing_leaked(queue.client)
    other.client.hset(other.keys.job("a"), "state", "failed")
    assert other.keys.job("a") in leaked_keys(queue.client)
