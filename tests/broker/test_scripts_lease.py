"""Which job a worker gets, and what stands in a stream that is no job."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from broker import calls
from broker.keys import Keys
from broker.queue import Queue
from protocol import PRIORITIES, Priority
from tests.broker.steps import (
    Worker,
    assert_drained,
    assert_ended_once,
    counts,
    dead_letters,
    end,
    hear,
    ids_of,
    job,
    lapse,
    put,
    say,
    snapshot,
)

KEYS = Keys()
STREAM = KEYS.jobs("normal", "default")


def many(queue: Queue, count: int, prefix: str, **fields: Any) -> list[str]:
    names = [f"{prefix}{n}" for n in range(count)]
    put(queue, *names, **fields)
    return names


# -- order -----------------------------------------------------------------------------------------------------


def test_a_tenants_jobs_are_leased_in_the_order_they_came(queue: Queue) -> None:
    names = many(queue, 50, "j")
    worker = Worker(queue)
    assert ids_of(itertools.chain(worker.lease(7), worker.lease(1), worker.lease(100))) == names
    assert worker.lease() == []


@pytest.mark.parametrize("at_once", [1, 8])
def test_lower_priorities_have_a_guaranteed_share(queue: Queue, at_once: int) -> None:
    for priority in PRIORITIES:
        many(queue, 100, priority, priority=priority)
    worker = Worker(queue)
    first = [lease.id for _ in range(80 // at_once) for lease in worker.lease(at_once)]
    shares = {priority: sum(name.startswith(priority) for name in first) for priority in PRIORITIES}
    assert shares == {"high": 60, "normal": 10, "low": 10}
    assert max(position for position, name in enumerate(first) if name.startswith("low")) - 70 <= 10


@pytest.mark.parametrize("priority", PRIORITIES)
def test_a_priority_alone_has_all_the_room(queue: Queue, priority: Priority) -> None:
    names = many(queue, 20, "j", priority=priority)
    assert ids_of(Worker(queue).lease(20)) == names


def test_high_goes_first(queue: Queue) -> None:
    put(queue, "low", priority="low")
    put(queue, "normal")
    put(queue, "high", priority="high")
    assert ids_of(Worker(queue).lease(3)) == ["high", "normal", "low"]


@pytest.mark.parametrize("newcomer", ["a", "z"])
@pytest.mark.parametrize("served", [0, 300])
def test_a_newcomer_is_served_within_two_picks(queue: Queue, newcomer: str, served: int) -> None:
    """Behind a thousand jobs of one tenant, whatever its name, and however long that tenant has been served."""
    many(queue, 1000, "bulk", tenant="m")
    worker = Worker(queue)
    if served:
        worker.lease(served)
    put(queue, "new", tenant=newcomer)
    assert "new" in ids_of(worker.lease(2))


def test_tenants_take_turns(queue: Queue) -> None:
    for tenant in "abc":
        many(queue, 30, tenant, tenant=tenant)
    first = ids_of(Worker(queue).lease(30))
    assert [sum(name.startswith(tenant) for name in first) for tenant in "abc"] == [10, 10, 10]


def test_a_tenant_that_was_away_has_no_credit(queue: Queue) -> None:
    """While b was idle, a was served 200 times; back again, b takes turns, and no more."""
    many(queue, 1, "b0-", tenant="b")
    many(queue, 400, "a", tenant="a")
    worker = Worker(queue)
    worker.lease(201)
    many(queue, 100, "b", tenant="b")
    next_forty = ids_of(worker.lease(40))
    assert 19 <= sum(name.startswith("b") for name in next_forty) <= 21


@pytest.mark.parametrize("others", [1, 3])
def test_tenants_that_come_back_after_each_job_do_not_starve_a_waiting_one(queue: Queue, others: int) -> None:
    """Interactive users with one job at a time, each submitted as the last one ends, beside a bulk tenant."""
    many(queue, 40, "bulk", tenant="zz")
    for user in range(others):
        put(queue, f"u{user}-0", tenant=f"u{user}")
    worker = Worker(queue)
    served = []
    for turn in range(1, 41):
        lease = worker.lease_one()
        served.append(lease.id)
        assert end(queue, lease) == "ok"
        if lease.id.startswith("u"):
            user = lease.id.partition("-")[0]
            put(queue, f"{user}-{turn}", tenant=user)
    share = sum(name.startswith("bulk") for name in served)
    assert abs(share - 40 / (others + 1)) <= 2


def test_reclaimed_jobs_go_before_new_ones(queue: Queue) -> None:
    put(queue, "a", "b")
    first = Worker(queue).lease(2)
    put(queue, "c", priority="high")
    lapse(queue, "b")
    queue.run(calls.release(KEYS, "w1", [calls.Handback(first[0].id, 1, False)]))
    assert ids_of(Worker(queue, "w2").lease(3)) == ["a", "b", "c"]


def test_paused_grants_nothing_and_keeps_everything(queue: Queue) -> None:
    put(queue, "a", "b")
    worker = Worker(queue)
    worker.lease_one()
    lapse(queue, "a")
    client: Any = queue.client
    client.hset(KEYS.meta, "paused", 1)
    assert worker.lease(5) == []
    client.hdel(KEYS.meta, "paused")
    assert ids_of(worker.lease(5)) == ["a", "b"]


# -- what the server lost --------------------------------------------------------------------------------------


def test_after_flushall_the_queue_works_again(queue: Queue) -> None:
    worker = Worker(queue)
    put(queue, "before")
    worker.lease_one()
    queue.client.flushall()
    assert worker.lease() == []
    put(queue, "j1")
    assert ids_of(worker.lease()) == ["j1"]


def test_a_lost_group_is_made_again_from_the_start(queue: Queue) -> None:
    put(queue, "a", "b")
    client: Any = queue.client
    client.xgroup_destroy(STREAM, "workers")
    put(queue, "c")
    worker = Worker(queue)
    leases = worker.lease(5)
    assert ids_of(leases) == ["a", "b", "c"]
    for lease in leases:
        end(queue, lease)
    assert_drained(queue)


def test_a_group_lost_under_leased_jobs_runs_none_of_them_twice(queue: Queue) -> None:
    put(queue, "held", "handed-back", "lapsed", "waits")
    worker = Worker(queue)
    held, handed_back, _ = worker.lease(3)
    client: Any = queue.client
    client.xgroup_destroy(STREAM, "workers")
    queue.run(calls.release(KEYS, "w1", [calls.Handback(handed_back.id, 1, False)]))
    lapse(queue, "lapsed")
    others = Worker(queue, "w2").lease(10)
    assert sorted(ids_of(others)) == ["handed-back", "lapsed", "waits"]
    assert Worker(queue, "w3").lease(10) == []
    for lease in [held, *others]:
        assert end(queue, lease) == "ok"
        assert_ended_once(queue, lease.id)
    assert_drained(queue)


def beat_until_swept(queue: Queue) -> None:
    """Heartbeats until the search for stray jobs has gone round."""
    for _ in range(20):
        queue.run(calls.heartbeat(KEYS, "w9", {}))


LOSSES = {
    "trimmed": lambda client: client.xtrim(STREAM, maxlen=1, approximate=False),
    "all trimmed": lambda client: client.xtrim(STREAM, maxlen=0, approximate=False),
    "stream deleted": lambda client: client.delete(STREAM),
    "tenants deleted": lambda client: client.delete(KEYS.tenants("normal")),
    "an entry deleted": lambda client: client.xdel(STREAM, client.xrange(STREAM)[3][0]),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_jobs_whose_entries_are_gone_run_all_the_same(queue: Queue, loss: str) -> None:
    """Of five jobs three are leased, two of them by a worker that dies; somebody takes entries or keys away."""
    names = many(queue, 5, "j")
    held, *_ = Worker(queue).lease(3)
    LOSSES[loss](queue.client)
    lapse(queue, "j1", "j2")
    worker = Worker(queue, "w2")
    leases = worker.lease(10)
    beat_until_swept(queue)
    leases += worker.lease(10)
    assert sorted(ids_of(leases)) == names[1:]
    for lease in [held, *leases]:
        assert end(queue, lease) == "ok"
        assert_ended_once(queue, lease.id)
    beat_until_swept(queue)
    assert Worker(queue, "w3").lease(5) == []
    assert_drained(queue)


def test_lost_leases_come_back_after_a_minute_for_their_owner_to_renew(queue: Queue) -> None:
    put(queue, "alive", "dead")
    Worker(queue).lease(2)
    queue.client.delete(KEYS.leases)
    assert queue.run(calls.renew(KEYS, "w1", 5000, [("alive", 1)])) == ["held"]
    assert Worker(queue, "w2").lease(5) == []
    beat_until_swept(queue)
    assert Worker(queue, "w2").lease(5) == []
    assert queue.run(calls.status(KEYS)).running == 2
    lapse(queue, "dead")
    assert ids_of(Worker(queue, "w2").lease(5)) == ["dead"]


def test_counts_are_right_again_after_job_hashes_were_deleted(queue: Queue) -> None:
    put(queue, "a", "b", "c")
    lease = Worker(queue).lease_one()
    queue.client.delete(KEYS.job("a"), KEYS.job("b"))
    assert end(queue, lease) == "lost"
    beat_until_swept(queue)
    assert counts(queue)[0] == 3  # c waits: nothing is known yet
    lapse(queue, "a")
    (c,) = Worker(queue, "w2").lease(5)
    assert c.id == "c"
    beat_until_swept(queue)
    assert counts(queue)[0] == 3
    end(queue, c)
    assert Worker(queue, "w2").lease(5) == []
    beat_until_swept(queue)
    assert counts(queue) == (0, 0)
    letters = sorted((letter["id"], letter["reason"]) for letter in dead_letters(queue))
    assert letters == [(b"a", b"lost_payload"), (b"b", b"lost_payload")]


def test_the_search_leaves_a_healthy_queue_alone(queue: Queue) -> None:
    put(queue, "a", "b", "c")
    queue.run(calls.heartbeat(KEYS, "w9", {}))
    worker = Worker(queue)
    lease, released = worker.lease(2)
    queue.run(calls.release(KEYS, "w1", [calls.Handback(released.id, 1, False)]))
    say(queue, lease, 1, "x")
    before = snapshot(queue)
    beat_until_swept(queue)
    after = snapshot(queue)
    assert {key for key in before if before[key] != after[key]} <= {KEYS.workers.encode()}


@pytest.mark.usefixtures("keys_broken_by_hand")
def test_the_search_goes_through_many_keys_in_pieces(queue: Queue) -> None:
    client: Any = queue.client
    with client.pipeline(transaction=False) as pipe:
        for n in range(5000):
            pipe.set(f"foreign:{n}", n)
        pipe.execute()
    put(queue, "a")
    client.xtrim(STREAM, maxlen=0, approximate=False)
    worker = Worker(queue)
    assert worker.lease() == []
    with client.pubsub() as channel:
        channel.subscribe(KEYS.control)
        assert hear(channel, 1, timeout_s=0.05) == []
        beat_until_swept(queue)
        assert hear(channel, 1) == ["wake"]
    assert ids_of(worker.lease()) == ["a"]


# -- what is no job --------------------------------------------------------------------------------------------

FOREIGN: list[dict[bytes, bytes]] = [
    {b"x": b"no payload field"},
    {b"payload": b"{not json"},
    {b"payload": b"[1,2,3]"},
    {b"payload": b"null"},
    {b"payload": bytes.fromhex("fffe00ff")},
    {b"payload": b'{"v":99,"id":"future"}'},
    {b"payload": b'{"id":"","prompt":"x"}'},
    {b"payload": b'{"id":"deep","prompt":' + b"[" * 500 + b"]" * 500 + b"}"},
    {b"id": b""},
    {b"id": b"never-submitted"},
    {b"id": bytes.fromhex("fffe00ff")},
    {b"id": b"x" * 100_000},
    {b"": b""},
]
NOT_JOBS: list[dict[str, str]] = [
    {"state": "queued"},
    {"state": "queued", "payload": "{}"},
    {"state": "queued", "payload": "{}", "about": ""},
    {"state": "queued", "payload": "{}", "about": "normal,default,,,"},
]


def test_foreign_entries_become_dead_letters_once(queue: Queue) -> None:
    client: Any = queue.client
    for fields in FOREIGN:  # the stream has neither a group nor a tenant yet
        client.xadd(STREAM, fields)
    put(queue, "good")
    worker = Worker(queue)
    lease = worker.lease_one()
    assert lease.id == "good"
    assert len(dead_letters(queue)) == len(FOREIGN)
    reasons = [letter["reason"].decode() for letter in dead_letters(queue)]
    assert reasons == ["not_a_job"] * 8 + ["lost_payload"] * 4 + ["not_a_job"]
    assert client.xinfo_groups(STREAM)[0]["pending"] == 1
    end(queue, lease)
    assert worker.lease() == []
    assert len(dead_letters(queue)) == len(FOREIGN)
    assert_drained(queue)


@pytest.mark.parametrize("fields", NOT_JOBS)
def test_a_hash_that_is_no_job_stops_nobody(queue: Queue, fields: dict[str, str]) -> None:
    client: Any = queue.client
    entry = client.xadd(STREAM, {"id": "x"})
    client.hset(KEYS.job("x"), mapping={**fields, "entry": entry})
    put(queue, "good")
    assert ids_of(Worker(queue).lease(2)) == ["good"]
    reason = b"spoilt_job" if "payload" in fields else b"lost_payload"
    assert [letter["reason"] for letter in dead_letters(queue)] == [reason]
    assert counts(queue)[0] == 1


def test_a_foreign_entry_between_jobs_holds_up_nobody(queue: Queue) -> None:
    client: Any = queue.client
    put(queue, "a")
    client.xadd(STREAM, {"x": "y"})
    put(queue, "b")
    leases = Worker(queue).lease(2)
    assert ids_of(leases) == ["a", "b"]
    assert counts(queue)[0] == 2


def test_a_copied_entry_does_not_run_its_job_again(queue: Queue) -> None:
    client: Any = queue.client
    put(queue, "a")
    client.xadd(STREAM, {"id": "a"})
    worker = Worker(queue)
    (lease,) = worker.lease(5)
    client.xadd(STREAM, {"id": "a"})
    put(queue, "b")
    assert ids_of(worker.lease(5)) == ["b"]
    end(queue, lease)
    client.xadd(STREAM, {"id": "a"})
    put(queue, "c")
    assert ids_of(worker.lease(5)) == ["c"]
    assert dead_letters(queue) == []


def test_a_flood_of_foreign_entries_is_cleared_in_pieces(queue: Queue) -> None:
    """One script may not hold up the server for long; the worker is told to go on."""
    client: Any = queue.client
    with client.pipeline(transaction=False) as pipe:
        for n in range(2500):
            pipe.xadd(STREAM, {"n": n})
        pipe.execute()
    put(queue, "good")
    worker = Worker(queue)
    answers = [worker.ask(4)]
    while not answers[-1].leases:
        answers.append(worker.ask(4))
    assert [answer.next_ms == 0 for answer in answers] == [True, True, False]
    assert ids_of(answers[-1].leases) == ["good"]
    assert len(dead_letters(queue)) == 2500


def test_a_large_payload_passes_whole(queue: Queue) -> None:
    prompt = "é\u0000\U0001f600" * 100_000
    put(queue, "big", prompt=prompt)
    lease = Worker(queue).lease_one()
    assert lease.payload == job("big", prompt=prompt).encode()
