"""Workers and the queue: which model it serves, who lives, who is woken, how it stands."""

from __future__ import annotations

from typing import Any

import pytest

from broker import calls
from broker.calls import FORGET_WORKER_MS
from broker.keys import Keys
from broker.loading import Loading, leave, note_loading
from broker.queue import Queue
from protocol import Fingerprint
from tests.broker.steps import MODEL, Worker, beat_at, counts, end, hear, lapse, put, server_ms

KEYS = Keys()
OTHER = Fingerprint(name="tiny", dtype="bfloat16")


def register(queue: Queue, worker: str, model: Fingerprint) -> Fingerprint | None:
    return queue.run(calls.register(KEYS, worker, model))


def beat(queue: Queue, worker: str, **info: Any) -> str:
    return queue.run(calls.heartbeat(KEYS, worker, info))


def test_the_first_worker_binds_the_queue(queue: Queue) -> None:
    assert register(queue, "w1", MODEL) is None
    assert register(queue, "w2", MODEL) is None
    assert register(queue, "w3", OTHER) == MODEL
    assert queue.run(calls.status(KEYS)).fingerprint == MODEL


def test_two_models_cannot_bind_an_idle_queue_in_turn(queue: Queue) -> None:
    """Registering counts as a sign of life: there is no moment before the first heartbeat."""
    assert register(queue, "w1", MODEL) is None
    assert register(queue, "w2", OTHER) == MODEL
    assert [worker.worker for worker in queue.run(calls.status(KEYS)).workers] == ["w1"]


def test_a_queue_with_jobs_keeps_its_model_though_no_worker_lives(queue: Queue) -> None:
    register(queue, "w1", MODEL)
    put(queue, "a")
    beat_at(queue, "w1", age_ms=60_000)
    assert register(queue, "w2", OTHER) == MODEL
    end(queue, Worker(queue).lease_one())
    assert register(queue, "w2", OTHER) is None


def test_an_idle_queue_takes_another_model_once_its_workers_are_gone(queue: Queue) -> None:
    register(queue, "w1", MODEL)
    beat_at(queue, "w1", age_ms=calls.ALIVE_MS + 1000)
    assert register(queue, "w2", OTHER) is None
    assert queue.run(calls.status(KEYS)).fingerprint == OTHER
    # The worker that was only asleep hears of it, and is refused.
    assert beat(queue, "w1") == "unknown"
    assert register(queue, "w1", MODEL) == OTHER


def test_a_worker_alone_may_come_back_with_another_model(queue: Queue) -> None:
    register(queue, "w1", MODEL)
    assert register(queue, "w1", OTHER) is None
    assert register(queue, "w2", MODEL) == OTHER


def test_a_heartbeat_after_flushall_says_to_register_again(queue: Queue) -> None:
    register(queue, "w1", MODEL)
    assert beat(queue, "w1") == "ok"
    queue.client.flushall()
    assert beat(queue, "w1") == "unknown"
    assert beat(queue, "w1") == "unknown", "the first of these replies may have been lost"
    register(queue, "w1", MODEL)
    assert beat(queue, "w1") == "ok"


def test_workers_are_forgotten_after_ten_minutes(queue: Queue) -> None:
    beat_at(queue, "old", age_ms=FORGET_WORKER_MS + 1000)
    beat_at(queue, "silent", age_ms=FORGET_WORKER_MS - 5000)
    register(queue, "w1", MODEL)
    beat(queue, "w1", slots=4)
    workers = {worker.worker: worker for worker in queue.run(calls.status(KEYS)).workers}
    assert set(workers) == {"silent", "w1"}
    assert (workers["w1"].alive, workers["silent"].alive) == (True, False)
    assert workers["w1"].info == {"slots": 4}
    assert 0 <= workers["w1"].age_ms < 2000
    assert FORGET_WORKER_MS - 5000 <= workers["silent"].age_ms < FORGET_WORKER_MS


def test_heartbeats_look_for_forgotten_workers_once_in_a_while(queue: Queue) -> None:
    """All of them are read for that: 1,000 workers that each did so at each beat took a third of a server."""
    client: Any = queue.client
    register(queue, "w1", MODEL)
    client.config_resetstat()
    for _ in range(5):
        beat(queue, "w1")
    assert client.info("commandstats")["cmdstat_hgetall"]["calls"] == 2, "workers, and those that load"
    beat_at(queue, "old", age_ms=FORGET_WORKER_MS + 1000)
    beat(queue, "w1")
    assert b"old" in client.hkeys(KEYS.workers)
    for last in (
        server_ms(queue) - 31_000,
        server_ms(queue) + 60_000,
        "no number",
    ):  # a clock may have been wrong
        client.hset(KEYS.meta, "forgotten", last)
        beat_at(queue, "old", age_ms=FORGET_WORKER_MS + 1000)
        beat(queue, "w1")
        assert client.hkeys(KEYS.workers) == [b"w1"]


@pytest.mark.parametrize("how", ["leaves", "is forgotten"])
def test_a_stream_that_always_has_work_forgets_who_is_gone(queue: Queue, how: str) -> None:
    put(queue, *(f"j{n}" for n in range(9)))
    client: Any = queue.client
    for name in ("gone", "crashed", "w1"):
        (lease,) = Worker(queue, name).lease()
        if name == "gone":
            assert end(queue, lease) == "ok"
    for name in ("gone", "crashed"):
        if how == "leaves":
            queue.run(leave(KEYS, name))
        else:
            beat_at(queue, name, age_ms=FORGET_WORKER_MS + 1000)
    register(queue, "w1", MODEL)
    beat(queue, "w1")
    stream = KEYS.jobs("normal", "default")
    assert {one["name"] for one in client.xinfo_consumers(stream, "workers")} == {b"crashed", b"w1"}
    assert client.xpending(stream, "workers")["pending"] == 2, "what it had leased is to be seen as its"


def test_counts_that_somebody_spoilt_are_right_once_nothing_is_held(queue: Queue) -> None:
    register(queue, "w1", MODEL)
    for entries, size in ((0, 10**9), (0, -5), (-3, -70)):
        queue.client.hset(KEYS.meta, mapping={"entries": entries, "bytes": size})
        beat(queue, "w1")
        assert counts(queue) == (0, 0)
    put(queue, "a")
    before = counts(queue)
    beat(queue, "w1")
    assert counts(queue) == before


def loading(queue: Queue) -> dict[str, Loading]:
    return {one.worker: one for one in queue.run(calls.status(KEYS)).loading}


def say_it_was(queue: Queue, worker: str, ago_ms: int, since_ms: int) -> None:
    """As if a worker had last said so long ago that it has been loading for so long."""
    seconds, micros = queue.client.time()
    now = int(seconds) * 1000 + int(micros) // 1000
    queue.client.hset(KEYS.loading, worker, f"{now - ago_ms} {now - since_ms} a model")


def test_a_worker_that_loads_is_shown_until_it_registers_or_leaves(queue: Queue) -> None:
    queue.run(note_loading(KEYS, "w1", "org/model"))
    queue.run(note_loading(KEYS, "w2", "org/model"))
    assert {(one.worker, one.model) for one in loading(queue).values()} == {
        ("w1", "org/model"),
        ("w2", "org/model"),
    }
    assert queue.run(calls.status(KEYS)).workers == ()
    register(queue, "w1", MODEL)
    assert set(loading(queue)) == {"w2"}
    queue.run(leave(KEYS, "w2"))
    queue.run(leave(KEYS, "w1"))
    status = queue.run(calls.status(KEYS))
    assert (status.loading, status.workers) == ((), ())
    assert not queue.client.exists(KEYS.loading, KEYS.workers)


def test_what_a_worker_said_before_it_registered_may_come_late(queue: Queue) -> None:
    register(queue, "w1", MODEL)
    queue.run(note_loading(KEYS, "w1", "org/model"))
    assert loading(queue) == {}


def test_since_when_it_loads_stays_and_heartbeats_forget_who_says_nothing(queue: Queue) -> None:
    say_it_was(queue, "w1", ago_ms=3000, since_ms=100_000)
    say_it_was(queue, "silent", ago_ms=calls.ALIVE_MS + 1000, since_ms=100_000)
    say_it_was(queue, "killed", ago_ms=FORGET_WORKER_MS + 1000, since_ms=FORGET_WORKER_MS + 100_000)
    queue.run(note_loading(KEYS, "w1", "org/model"))
    beat(queue, "another")
    assert set(loading(queue)) == {"w1"}
    assert 100_000 <= loading(queue)["w1"].since_ms < 110_000
    assert set(queue.client.hkeys(KEYS.loading)) == {b"w1", b"silent"}
    assert 0 < queue.client.pttl(KEYS.loading) <= 60_000


def test_status_counts(queue: Queue) -> None:
    empty = queue.run(calls.status(KEYS))
    assert empty == calls.Status(None, 0, 0, 0, 0, paused=False, workers=())
    put(queue, "a", "b", "c", "d")
    worker = Worker(queue)
    leases = worker.lease(3)
    lapse(queue, "b")
    queue.run(calls.release(KEYS, "w1", [calls.Handback("c", 1, False)]))
    status = queue.run(calls.status(KEYS))
    assert (status.waiting, status.running, status.dead) == (3, 1, 0)
    assert status.bytes == sum(len(lease.payload) for lease in leases) // 3 * 4
    end(queue, leases[0], state="dead", dead_reason="crashed alone")
    queue.client.hset(KEYS.meta, "paused", 1)
    status = queue.run(calls.status(KEYS))
    assert (status.waiting, status.running, status.dead, status.paused) == (3, 0, 1, True)


def test_a_dead_letter_keeps_its_payload_and_reason(queue: Queue) -> None:
    put(queue, "a")
    lease = Worker(queue).lease_one()
    end(queue, lease, state="dead", dead_reason="crashed alone")
    client: Any = queue.client
    ((_, letter),) = client.xrange(KEYS.dead)
    assert letter == {
        b"id": b"a",
        b"reason": b"crashed alone",
        b"raw": lease.payload,
        b"attempt": b"1",
        b"worker": b"w1",
    }
    assert client.hget(KEYS.job("a"), "payload") == b""


def test_crashes_are_counted_only_where_the_worker_says_so(queue: Queue) -> None:
    put(queue, "a")
    seen = []
    worker = Worker(queue)
    for crashed in (True, False, True, None):
        lease = worker.lease_one()
        seen.append((lease.attempt, lease.crashes))
        if crashed is None:
            lapse(queue, "a")
        else:
            queue.run(calls.release(KEYS, "w1", [calls.Handback("a", lease.attempt, crashed)]))
    seen.append((worker.lease_one().attempt, queue.run(calls.look(KEYS, "a")).attempt))
    assert seen == [(1, 0), (2, 1), (3, 1), (4, 2), (5, 5)]


def test_look_says_who_has_the_job(queue: Queue) -> None:
    put(queue, "a")
    assert queue.run(calls.look(KEYS, "a")) == calls.Look("queued", None, 0, "")
    Worker(queue).lease_one()
    assert queue.run(calls.look(KEYS, "a")) == calls.Look("running", None, 1, "w1")
    queue.run(calls.release(KEYS, "w1", [calls.Handback("a", 1, False)]))
    assert queue.run(calls.look(KEYS, "a")) == calls.Look("queued", None, 1, "")


def test_a_hungry_worker_is_woken_once(queue: Queue) -> None:
    with queue.client.pubsub() as channel:
        channel.subscribe(KEYS.control)
        assert hear(channel, 1, timeout_s=0.05) == []
        put(queue, "nobody-waits")
        Worker(queue).lease(2)
        put(queue, "a", "b", "c")
        assert hear(channel, 1) == ["wake"]
        assert hear(channel, 1, timeout_s=0.05) == []
        Worker(queue, "w2").lease(3)
        put(queue, "d")
        assert hear(channel, 1, timeout_s=0.1) == []
        queue.run(calls.release(KEYS, "w2", [calls.Handback("a", 1, False)]))
        assert hear(channel, 1) == ["wake"]
