"""What decides who is next: weights, pauses, bounds; and what a tenant's flood costs the others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import fakeredis

from broker import calls
from broker.keys import Keys
from broker.queue import Queue
from tests.broker.steps import Worker, assert_drained, end, hear, ids_of, put, snapshot

KEYS = Keys()


def weigh(queue: Queue, tenant: str, weight: float) -> dict[str, float]:
    return queue.run(calls.weights(KEYS, tenant, weight))


def shares(queue: Queue, picks: int, at_once: int) -> Counter[str]:
    worker = Worker(queue)
    return Counter(lease.id[0] for _ in range(picks // at_once) for lease in worker.lease(at_once))


# -- weights ---------------------------------------------------------------------------------------------------


def test_tenants_share_by_weight(queue: Queue) -> None:
    weigh(queue, "a", 3)
    weigh(queue, "c", 0.5)
    for tenant in "abc":
        put(queue, *(f"{tenant}{n}" for n in range(70)), tenant=tenant)
    share = shares(queue, 90, 15)
    assert abs(share["a"] - 60) <= 2
    assert abs(share["b"] - 20) <= 2
    assert abs(share["c"] - 10) <= 2


def test_a_weight_counts_from_the_next_pick_on(queue: Queue) -> None:
    for tenant in "ab":
        put(queue, *(f"{tenant}{n}" for n in range(60)), tenant=tenant)
    assert abs(shares(queue, 20, 1)["a"] - 10) <= 1
    weigh(queue, "a", 4)
    worker = Worker(queue, "w2")
    later = Counter(lease.id[0] for _ in range(50) for lease in worker.lease(1))
    assert abs(later["a"] - 40) <= 2


def test_a_light_tenant_is_served_however_heavy_the_others(queue: Queue) -> None:
    weigh(queue, "a", 100)
    weigh(queue, "b", 0.5)
    put(queue, *(f"a{n}" for n in range(250)), tenant="a")
    put(queue, "b0", tenant="b")
    worker = Worker(queue)
    position = ids_of(worker.lease(250)).index("b0")
    assert position <= 201


def test_weights_are_set_once_and_the_common_one_is_not_kept(queue: Queue) -> None:
    assert weigh(queue, "a", 2.5) == {"a": 2.5}
    before = snapshot(queue)
    assert weigh(queue, "a", 2.5) == {"a": 2.5}
    assert snapshot(queue) == before
    assert queue.run(calls.weights(KEYS)) == {"a": 2.5}
    assert weigh(queue, "b", 0.1) == {"a": 2.5, "b": 0.1}
    assert weigh(queue, "a", 1) == {"b": 0.1}
    assert weigh(queue, "b", 1) == {}


# -- pausing ---------------------------------------------------------------------------------------------------


def test_a_paused_queue_takes_jobs_and_ends_them_but_starts_none(queue: Queue) -> None:
    put(queue, "a")
    worker = Worker(queue)
    running = worker.lease_one()
    assert queue.run(calls.pause(KEYS, True)) is True
    put(queue, "b")
    assert worker.ask(5).leases == []
    assert queue.run(calls.status(KEYS)).paused
    assert end(queue, running) == "ok"
    assert queue.run(calls.pause(KEYS, False)) is False
    assert ids_of(worker.lease(5)) == ["b"]


def test_a_paused_queue_is_not_asked_again_and_again(queue: Queue) -> None:
    put(queue, "a", "b")
    Worker(queue).lease_one(lease_ms=1)
    queue.run(calls.pause(KEYS, True))
    worker = Worker(queue, "w2")
    while worker.ask().next_ms is not None:
        pass  # until the lease has lapsed
    assert worker.ask(5) == calls.Leased([], None, paused=True)


def test_pausing_again_changes_nothing_and_resuming_wakes_once(queue: Queue) -> None:
    for paused in (True, True):
        assert queue.run(calls.pause(KEYS, paused)) is True
        before = snapshot(queue)
    assert snapshot(queue) == before
    with queue.client.pubsub() as channel:
        channel.subscribe(KEYS.control)
        assert hear(channel, 1, timeout_s=0.05) == []
        for _ in range(2):
            assert queue.run(calls.pause(KEYS, False)) is False
        assert hear(channel, 1) == ["wake"]
        assert hear(channel, 1, timeout_s=0.1) == [], "the second time nothing was paused"
    assert not queue.run(calls.status(KEYS)).paused


# -- bounds ----------------------------------------------------------------------------------------------------


def test_bounds_are_set_shown_and_set_back(queue: Queue) -> None:
    default = calls.Limits(calls.DEFAULT_MAX_ENTRIES, calls.DEFAULT_MAX_BYTES, 0, 0)
    assert queue.run(calls.limits(KEYS)) == default
    for _ in range(2):
        assert queue.run(calls.limits(KEYS, max_entries=2)).max_entries == 2
    assert queue.run(calls.limits(KEYS, max_bytes=1000)) == calls.Limits(2, 1000, 0, 0)
    put(queue, "a", "b")
    full = calls.submit(KEYS, calls.Job(id="c", prompt="p"))
    assert queue.run(full).outcome == "full"
    found = queue.run(calls.limits(KEYS, max_entries=0))
    assert (found.max_entries, found.max_bytes, found.entries) == (calls.DEFAULT_MAX_ENTRIES, 1000, 2)
    assert queue.run(full).outcome == "queued"
    assert queue.run(calls.limits(KEYS, max_bytes=0)).max_bytes == calls.DEFAULT_MAX_BYTES


def test_one_lease_takes_no_more_than_16_mib_and_says_that_there_is_more(queue: Queue) -> None:
    put(queue, *(f"j{n}" for n in range(7)), prompt="x" * (3 << 20))
    worker = Worker(queue)
    answers = [worker.ask(7), worker.ask(7)]
    assert [len(answer.leases) for answer in answers] == [6, 1]
    assert answers[0].next_ms == 0
    client: Any = queue.client
    assert client.xinfo_groups(KEYS.jobs("normal", "default"))[0]["lag"] == 0
    for lease in [lease for answer in answers for lease in answer.leases]:
        end(queue, lease)
    assert_drained(queue)


def test_pauses_weights_and_bounds_on_the_imitation_too(fake_redis: fakeredis.FakeRedis) -> None:
    queue = Queue(fake_redis, KEYS)
    assert weigh(queue, "a", 2) == {"a": 2.0}
    for tenant in "ab":
        put(queue, *(f"{tenant}{n}" for n in range(30)), tenant=tenant)
    assert queue.run(calls.pause(KEYS, True)) is True
    assert Worker(queue).lease(5) == []
    assert queue.run(calls.pause(KEYS, False)) is False
    assert abs(shares(queue, 30, 1)["a"] - 20) <= 1
    assert queue.run(calls.limits(KEYS, 5, 6)).max_entries == 5
