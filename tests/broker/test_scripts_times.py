"""Times: jobs that start later, jobs with a deadline, jobs that are tried again; all by the server's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fakeredis
import pytest

from broker import calls
from broker.calls import Handback
from broker.keys import Keys
from broker.queue import Queue
from tests.broker.steps import (
    Worker,
    assert_drained,
    assert_ended_once,
    counts,
    end,
    hear,
    ids_of,
    job,
    lapse,
    put,
    say,
    server_ms,
    snapshot,
    told,
)

KEYS = Keys()
HOUR_S = 3600.0
SOON_S = 0.3


def hand_back(
    queue: Queue, job_id: str = "a", attempt: int = 1, retry_in_ms: int = 0, worker: str = "w1"
) -> int:
    return queue.run(calls.release(KEYS, worker, [Handback(job_id, attempt, False, retry_in_ms)]))


def time_comes(queue: Queue, *ids: str) -> None:
    """As if the time these jobs wait for had passed."""
    client: Any = queue.client
    client.zadd(KEYS.delayed, dict.fromkeys(ids, 1), xx=True)


def deadline_passes(queue: Queue, job_id: str = "a") -> None:
    client: Any = queue.client
    client.hset(KEYS.job(job_id), "deadline", 1)
    client.zadd(KEYS.deadlines, {job_id: 1}, xx=True)


def state_of(queue: Queue, job_id: str = "a") -> str | None:
    client: Any = queue.client
    state: bytes | None = client.hget(KEYS.job(job_id), "state")
    return None if state is None else state.decode()


# -- later -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["not_before", "delay_s"])
def test_a_delayed_job_waits_for_its_time_and_runs_then(queue: Queue, field: str) -> None:
    worker = Worker(queue)
    put(queue, "b")
    now_s = server_ms(queue) / 1000
    put(queue, "a", **{field: SOON_S if field == "delay_s" else now_s + SOON_S})
    first = worker.ask(5)
    assert ids_of(first.leases) == ["b"]
    assert first.next_ms is not None
    assert 0 < first.next_ms <= 1000 * SOON_S + 1
    assert queue.run(calls.status(KEYS)).delayed == 1
    leases = []
    while not leases:
        leases = worker.lease(5)
    assert ids_of(leases) == ["a"]
    assert leases[0].leased_ms >= 1000 * (now_s + SOON_S) - 1
    for lease in [*first.leases, *leases]:
        end(queue, lease)
    assert_drained(queue)


def test_a_time_that_has_passed_is_none(queue: Queue) -> None:
    put(queue, "a", not_before=1.0)
    assert ids_of(Worker(queue).lease()) == ["a"]


def test_a_delayed_job_is_counted_cancelled_and_submitted_again_as_any(queue: Queue) -> None:
    asked = job("a", delay_s=HOUR_S)
    assert queue.run(calls.submit(KEYS, asked)).outcome == "queued"
    before = snapshot(queue)
    assert queue.run(calls.submit(KEYS, asked)).outcome == "same"
    assert snapshot(queue) == before
    assert counts(queue) == (1, len(asked.encode()))
    status = queue.run(calls.status(KEYS))
    assert (status.waiting, status.delayed, status.running) == (1, 1, 0)
    assert queue.run(calls.cancel(KEYS, "a")) == ("cancelled", None)
    assert_ended_once(queue, "a", "cancelled")
    assert_drained(queue)


def test_a_copied_entry_does_not_start_a_delayed_job_early(queue: Queue) -> None:
    put(queue, "a", delay_s=HOUR_S)
    client: Any = queue.client
    client.xadd(KEYS.jobs("normal", "default"), {"id": "a"})
    client.zadd(KEYS.tenants("normal"), {"default": 1})
    assert Worker(queue).lease(5) == []
    assert state_of(queue) == "queued"


def test_a_job_whose_time_comes_wakes_a_worker_that_another_ones_heartbeat_frees_it_for(queue: Queue) -> None:
    put(queue, "a", delay_s=HOUR_S)
    Worker(queue).lease()
    with queue.client.pubsub() as channel:
        channel.subscribe(KEYS.control)
        assert hear(channel, 1, timeout_s=0.05) == []
        time_comes(queue, "a")
        queue.run(calls.heartbeat(KEYS, "w2", {}))
        assert hear(channel, 1) == ["wake"]
    assert ids_of(Worker(queue, "w3").lease()) == ["a"]


def test_hungry_workers_hear_of_a_delayed_job_so_that_they_know_when_to_look(queue: Queue) -> None:
    worker = Worker(queue)
    assert worker.ask() == calls.Leased([], None)
    with queue.client.pubsub() as channel:
        channel.subscribe(KEYS.control)
        assert hear(channel, 1, timeout_s=0.05) == []
        put(queue, "a", delay_s=HOUR_S)
        assert hear(channel, 1) == ["wake"]
    next_ms = worker.ask().next_ms
    assert next_ms is not None
    assert 1000 * HOUR_S - 5000 < next_ms <= 1000 * HOUR_S


def test_many_jobs_whose_time_comes_at_once_are_taken_up_in_pieces(queue: Queue) -> None:
    names = [f"j{n}" for n in range(600)]
    put(queue, *names, delay_s=HOUR_S)
    time_comes(queue, *names)
    worker = Worker(queue)
    first = worker.lease(1)
    assert ids_of(first)
    client: Any = queue.client
    assert client.zcard(KEYS.delayed) == 100
    leases = [lease for _ in range(2) for lease in worker.lease(500)]
    assert len({*ids_of(first), *ids_of(leases)}) == 600


def test_delayed_jobs_that_fell_out_of_their_set_are_found_and_keep_their_time(queue: Queue) -> None:
    put(queue, "a", delay_s=HOUR_S)
    client: Any = queue.client
    client.delete(KEYS.delayed)
    for _ in range(3):
        queue.run(calls.heartbeat(KEYS, "w9", {}))
    assert Worker(queue).lease() == []
    assert queue.run(calls.status(KEYS)).delayed == 1
    time_comes(queue, "a")
    assert ids_of(Worker(queue).lease()) == ["a"]


# -- tried again -----------------------------------------------------------------------------------------------


def test_a_job_handed_back_to_be_tried_again_waits_and_counts(queue: Queue) -> None:
    put(queue, "a", max_retries=7)
    worker = Worker(queue)
    lease = worker.lease_one()
    assert (lease.retries, lease.max_retries) == (0, 7)
    say(queue, lease, 1, "so far")
    assert hand_back(queue, retry_in_ms=60_000) == 1
    assert hand_back(queue, retry_in_ms=60_000) == 0  # again
    answer = worker.ask(5)
    assert answer.leases == []
    assert answer.next_ms is not None
    assert 55_000 < answer.next_ms <= 60_000
    status = queue.run(calls.status(KEYS))
    assert (status.waiting, status.delayed, status.running) == (1, 1, 0)
    assert state_of(queue) == "queued"
    time_comes(queue, "a")
    again = worker.lease_one()
    assert (again.attempt, again.crashes, again.retries, again.logged) == (2, 0, 1, 1)
    end(queue, again, 1, "so far")
    assert_ended_once(queue, "a")
    assert_drained(queue)


def test_a_job_that_waits_to_be_tried_again_is_cancelled_at_once(queue: Queue) -> None:
    put(queue, "a")
    say(queue, Worker(queue).lease_one(), 1, "so far")
    hand_back(queue, retry_in_ms=60_000)
    assert queue.run(calls.cancel(KEYS, "a")) == ("cancelled", None)
    assert assert_ended_once(queue, "a", "cancelled").text == "so far"
    assert_drained(queue)


def test_a_cancelled_job_is_not_tried_again(queue: Queue) -> None:
    put(queue, "a")
    Worker(queue).lease_one()
    queue.run(calls.cancel(KEYS, "a"))
    hand_back(queue, retry_in_ms=60_000)
    assert_ended_once(queue, "a", "cancelled")
    assert_drained(queue)


# -- deadlines -------------------------------------------------------------------------------------------------


def lease_call(queue: Queue) -> object:
    return Worker(queue, "w9").lease(5)


SWEEPERS: dict[str, Callable[[Queue], object]] = {
    "lease": lease_call,
    "heartbeat": lambda queue: queue.run(calls.heartbeat(KEYS, "w9", {})),
    "look": lambda queue: queue.run(calls.look(KEYS, "a")),
    "cancel": lambda queue: queue.run(calls.cancel(KEYS, "a")),
}


def waiting(queue: Queue) -> None:
    put(queue, "a", deadline_in_s=HOUR_S)


def waiting_for_its_time(queue: Queue) -> None:
    put(queue, "a", delay_s=HOUR_S / 2, deadline_in_s=HOUR_S)


def to_be_tried_again(queue: Queue) -> None:
    put(queue, "a", deadline_in_s=HOUR_S)
    Worker(queue).lease_one()
    hand_back(queue, retry_in_ms=60_000)


def handed_back(queue: Queue) -> None:
    put(queue, "a", deadline_in_s=HOUR_S)
    Worker(queue).lease_one()
    hand_back(queue)


def lapsed(queue: Queue) -> None:
    put(queue, "a", deadline_in_s=HOUR_S)
    Worker(queue).lease_one()
    lapse(queue, "a")


@pytest.mark.parametrize("sweep", SWEEPERS)
def test_past_its_deadline_a_job_that_nobody_runs_ends(queue: Queue, sweep: str) -> None:
    for place in (waiting, waiting_for_its_time, to_be_tried_again, handed_back, lapsed):
        queue.client.flushall()
        assert_expires(queue, place, sweep)


def assert_expires(queue: Queue, place: Callable[[Queue], None], sweep: str) -> None:
    place(queue)
    deadline_passes(queue)
    SWEEPERS[sweep](queue)
    assert state_of(queue) == "expired"
    result = assert_ended_once(queue, "a", "expired")
    assert result.error is not None
    assert result.error.code == "deadline_exceeded"
    assert Worker(queue, "w9").lease(5) == []
    assert_drained(queue)


def test_a_deadline_is_kept_though_its_set_was_deleted(queue: Queue) -> None:
    put(queue, "a", deadline_in_s=HOUR_S)
    deadline_passes(queue)
    queue.client.delete(KEYS.deadlines)
    assert Worker(queue).lease() == []
    assert_ended_once(queue, "a", "expired")


def test_a_running_job_is_its_owners_to_stop(queue: Queue) -> None:
    """The owner is told the deadline with the lease; the sweep takes nothing from it, and does not spin."""
    put(queue, "a", deadline_in_s=HOUR_S)
    before = server_ms(queue)
    lease = Worker(queue).lease_one()
    assert lease.deadline_ms is not None
    assert abs(lease.deadline_ms - before - 1000 * HOUR_S) < 5000
    say(queue, lease, 1, "so far")
    deadline_passes(queue)
    other = Worker(queue, "w2")
    for _ in range(3):
        answer = other.ask(5)
        queue.run(calls.heartbeat(KEYS, "w2", {}))
    assert answer.leases == []
    assert answer.next_ms is not None
    assert answer.next_ms > 10_000
    assert queue.run(calls.look(KEYS, "a")).state == "running"
    assert end(queue, lease, 1, "so far", state="expired") == "ok"
    assert assert_ended_once(queue, "a", "expired").text == "so far"
    assert_drained(queue)


def test_an_expired_job_keeps_what_a_lost_worker_had_logged(queue: Queue) -> None:
    put(queue, "a", deadline_in_s=HOUR_S, run="r")
    say(queue, Worker(queue).lease_one(), 1, "so ", "far")
    deadline_passes(queue)
    lapse(queue, "a")
    assert Worker(queue, "w2").lease(5) == []
    result = assert_ended_once(queue, "a", "expired")
    assert (result.text, result.choices[0].finish_reason) == ("so far", "error")
    assert told(queue) == [{"a": "expired"}]


def test_a_deadline_passes_by_the_servers_clock(queue: Queue) -> None:
    before = server_ms(queue)
    put(queue, "a", deadline_in_s=SOON_S)
    after = server_ms(queue)
    while queue.run(calls.look(KEYS, "a")).state == "queued":
        assert server_ms(queue) - after < 1000 * SOON_S + 5000
    assert server_ms(queue) - before >= 1000 * SOON_S
    assert_ended_once(queue, "a", "expired")


def test_many_deadlines_are_swept_in_pieces(queue: Queue) -> None:
    names = [f"j{n}" for n in range(150)]
    put(queue, *names, deadline_in_s=HOUR_S)
    client: Any = queue.client
    client.zadd(KEYS.deadlines, dict.fromkeys(names, 1))
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hset(KEYS.job(name), "deadline", 1)
        pipe.execute()
    left = []
    for _ in range(2):
        queue.run(calls.heartbeat(KEYS, "w9", {}))
        left.append(counts(queue)[0])
    assert left == [50, 0]
    assert_drained(queue)


def test_a_paused_queue_grants_nothing_and_deadlines_pass_all_the_same(queue: Queue) -> None:
    put(queue, "a", deadline_in_s=HOUR_S)
    queue.run(calls.pause(KEYS, True))
    deadline_passes(queue)
    assert Worker(queue).ask() == calls.Leased([], None, paused=True)
    assert_ended_once(queue, "a", "expired")
    queue.run(calls.pause(KEYS, False))
    assert not Worker(queue).ask().paused


def test_times_on_the_imitation_too(fake_redis: fakeredis.FakeRedis) -> None:
    queue = Queue(fake_redis, KEYS)
    put(queue, "a", delay_s=HOUR_S)
    put(queue, "b", deadline_in_s=HOUR_S)
    deadline_passes(queue, "b")
    assert Worker(queue).lease(5) == []
    assert_ended_once(queue, "b", "expired")
    time_comes(queue, "a")
    assert end(queue, Worker(queue, "w2").lease_one()) == "ok"
    assert_drained(queue)


def test_a_sweep_over_long_logs_goes_on_in_the_next_call(queue: Queue) -> None:
    """What is logged of a job that ends without an owner is read: some of it in one call, whoever makes it."""
    names = [f"j{n}" for n in range(4)]
    put(queue, *names, deadline_in_s=HOUR_S)
    client: Any = queue.client
    for lease in Worker(queue).lease(4):
        say(queue, lease, 1, *(["x"] * 900))
    for name in names:
        deadline_passes(queue, name)
    lapse(queue, *names)
    left = [4]
    while left[-1]:
        queue.run(calls.heartbeat(KEYS, "w9", {}))
        left.append(counts(queue)[0])
    assert left == [4, 1, 0]
    assert {len(assert_ended_once(queue, name, "expired").choices[0].token_ids) for name in names} == {900}
    assert client.zcard(KEYS.deadlines) == 0
