"""Submitting: one job an id, bounds, retention."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from broker import calls
from broker.calls import Submitted
from broker.connection import connect
from broker.keys import Keys
from broker.parts import AT_ONCE, BYTES_AT_ONCE
from broker.queue import Queue
from protocol import Job
from protocol.job import LONGEST_S
from tests.broker.steps import (
    Worker,
    assert_drained,
    assert_ended_once,
    counts,
    end,
    events_of,
    ids_of,
    job,
    key_names,
    put,
    say,
    snapshot,
)
from tests.servers import RealServer

KEYS = Keys()


def submit(queue: Queue, job_id: str = "a", **fields: Any) -> Submitted:
    return queue.run(calls.submit(KEYS, job(job_id, **fields)))


# -- the same id twice -----------------------------------------------------------------------------------------


def test_same_id_and_payload_is_the_same_job_in_every_state(queue: Queue) -> None:
    seen = [submit(queue).outcome]
    states = [submit(queue).state]
    lease = Worker(queue).lease_one()
    states.append(submit(queue).state)
    end(queue, lease)
    states.append(submit(queue).state)
    assert (seen, states) == (["queued"], ["queued", "running", "succeeded"])
    assert Worker(queue, "w2").lease() == []
    assert_ended_once(queue, "a")
    assert_drained(queue)


def test_same_id_with_another_payload_is_a_conflict_in_every_state(queue: Queue) -> None:
    submit(queue, prompt="first")

    def second() -> tuple[str, str | None]:
        before = snapshot(queue)
        answer = submit(queue, prompt="second")
        assert snapshot(queue) == before
        return answer.outcome, answer.state

    assert second() == ("conflict", "queued")
    lease = Worker(queue).lease_one()
    assert second() == ("conflict", "running")
    end(queue, lease)
    assert second() == ("conflict", "succeeded")
    assert b"first" in lease.payload


@pytest.mark.parametrize("field", [{"priority": "low"}, {"tenant": "t"}, {"run": "r"}, {"stream": False}])
def test_any_difference_in_the_payload_is_a_conflict(queue: Queue, field: dict[str, Any]) -> None:
    submit(queue)
    assert submit(queue, **field).outcome == "conflict"
    assert counts(queue)[0] == 1


def test_two_producers_with_the_same_hundred_ids(queue: Queue, server: RealServer) -> None:
    names = [f"j{n}" for n in range(100)]

    def produce(order: list[str]) -> list[str]:
        own = Queue(connect(server.url), KEYS)
        outcomes = [submit(own, name).outcome for name in order]
        own.close()
        return outcomes

    with ThreadPoolExecutor(2) as pool:
        outcomes = [*pool.map(produce, [names, names[::-1]])]
    assert sorted(outcomes[0] + outcomes[1]) == ["queued"] * 100 + ["same"] * 100
    leases = Worker(queue).lease(200)
    assert sorted(ids_of(leases)) == sorted(names)
    for lease in leases:
        assert end(queue, lease) == "ok"
    assert {assert_ended_once(queue, name).attempt for name in names} == {1}
    assert_drained(queue)


# -- bounds ----------------------------------------------------------------------------------------------------


def test_a_full_queue_says_its_numbers_and_takes_again_after_an_end(queue: Queue) -> None:
    client: Any = queue.client
    client.hset(KEYS.meta, "max_entries", 2)
    put(queue, "a", "b")
    held = counts(queue)[1]
    assert submit(queue, "c") == Submitted("full", None, 2, held, 2, calls.DEFAULT_MAX_BYTES)
    assert submit(queue, "a").outcome == "same"
    end(queue, Worker(queue).lease_one())
    assert submit(queue, "c").outcome == "queued"
    assert submit(queue, "d").outcome == "full"
    queue.run(calls.cancel(KEYS, "b"))
    assert submit(queue, "d").outcome == "queued"


def test_bytes_are_bounded_as_entries_are(queue: Queue) -> None:
    size = len(job("a", prompt="x" * 100).encode())
    client: Any = queue.client
    client.hset(KEYS.meta, "max_bytes", 2 * size)
    put(queue, "a", "b", prompt="x" * 100)
    assert submit(queue, "c", prompt="") == Submitted(
        "full", None, 2, 2 * size, calls.DEFAULT_MAX_ENTRIES, 2 * size
    )
    end(queue, Worker(queue).lease_one())
    assert submit(queue, "c", prompt="x" * 101).outcome == "full"
    assert submit(queue, "c", prompt="x" * 100).outcome == "queued"


def test_bounds_hold_under_many_producers(queue: Queue, server: RealServer) -> None:
    client: Any = queue.client
    client.hset(KEYS.meta, "max_entries", 30)

    def produce(number: int) -> int:
        own = Queue(connect(server.url), KEYS)
        queued = sum(submit(own, f"{number}-{n}").outcome == "queued" for n in range(20))
        own.close()
        return queued

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(produce, range(4))) == 30
    assert counts(queue)[0] == 30


def test_running_jobs_count_until_they_end(queue: Queue) -> None:
    put(queue, "a", "b")
    leases = Worker(queue).lease(2)
    assert counts(queue)[0] == 2
    queue.run(calls.release(KEYS, "w1", [calls.Handback("a", 1, True)]))
    assert counts(queue)[0] == 2
    end(queue, leases[1])
    assert counts(queue)[0] == 1


# -- retention -------------------------------------------------------------------------------------------------


def times_to_live(queue: Queue, job_id: str = "a") -> list[int]:
    client: Any = queue.client
    return [client.pttl(key) for key in (KEYS.job(job_id), KEYS.log(job_id), KEYS.result(job_id))]


def ended(queue: Queue, **fields: Any) -> None:
    put(queue, "a", **fields)
    lease = Worker(queue).lease_one()
    say(queue, lease, 1, "x")
    assert end(queue, lease, 1, "x") == "ok"


def test_the_time_to_live_runs_from_the_end(queue: Queue) -> None:
    put(queue, "a", result_ttl_s=5)
    assert times_to_live(queue)[0] == -1
    lease = Worker(queue).lease_one()
    say(queue, lease, 1, "x")
    assert times_to_live(queue)[:2] == [-1, -1]
    end(queue, lease, 1, "x")
    assert all(3000 < ms <= 5000 for ms in times_to_live(queue))


@pytest.mark.parametrize("ttl", [0, None])
def test_no_time_to_live_means_keep(queue: Queue, ttl: int | None) -> None:
    ended(queue, result_ttl_s=ttl)
    assert times_to_live(queue) == [-1, -1, -1]
    assert_ended_once(queue, "a")


def test_after_its_time_the_job_is_unknown_and_its_id_is_free(queue: Queue) -> None:
    ended(queue, result_ttl_s=0.03)
    client: Any = queue.client
    while client.exists(KEYS.job("a"), KEYS.log("a"), KEYS.result("a")):
        pass
    assert queue.run(calls.look(KEYS, "a")) == calls.Look(None, None, 0, "")
    assert queue.run(calls.cancel(KEYS, "a")) == ("unknown", None)
    assert key_names(queue) == {KEYS.meta, KEYS.lease("w1")}
    assert submit(queue, prompt="another").outcome == "queued"


@pytest.mark.parametrize("ttl", [0.0001, LONGEST_S])
def test_no_time_to_live_is_too_short_or_too_long_to_end_with(queue: Queue, ttl: float) -> None:
    """A time that the server could not add would be refused only when the job ends; 0.1 ms is not 'keep'."""
    ended(queue, result_ttl_s=ttl)
    assert counts(queue) == (0, 0)
    assert all(ms != -1 for ms in times_to_live(queue))


def test_a_waiting_job_does_not_expire(queue: Queue) -> None:
    put(queue, "a", result_ttl_s=0.001)
    lease = Worker(queue).lease_one()
    say(queue, lease, 1, "x")
    client: Any = queue.client
    assert client.wait(0, 10) == 0
    assert queue.run(calls.look(KEYS, "a")).state == "running"
    assert times_to_live(queue)[:2] == [-1, -1]


# -- many at once ----------------------------------------------------------------------------------------------


def submit_all(queue: Queue, *jobs: Job) -> list[tuple[str, str | None]]:
    return [(one.outcome, one.state) for one in queue.run(calls.submit_all(KEYS, jobs))]


def test_many_are_answered_one_by_one_and_keep_their_order(queue: Queue) -> None:
    put(queue, "a", "b")
    Worker(queue).lease_one()
    asked = [job("c"), job("a"), job("b", prompt="other"), job("d", delay_s=60.0), job("e"), job("e")]
    assert submit_all(queue, *asked, job("c", prompt="other")) == [
        ("queued", "queued"),
        ("same", "running"),
        ("conflict", "queued"),
        ("queued", "queued"),
        ("queued", "queued"),
        ("same", "queued"),
        ("conflict", "queued"),
    ]
    assert counts(queue)[0] == 5
    assert ids_of(Worker(queue, "w2").lease(9)) == ["b", "c", "e"]


def test_from_the_first_that_finds_no_room_on_none_is_taken(queue: Queue) -> None:
    client: Any = queue.client
    client.hset(KEYS.meta, "max_entries", 2)
    put(queue, "a")
    assert [
        outcome for outcome, _ in submit_all(queue, job("b"), job("a"), job("c"), job("a"), job("d"))
    ] == [
        "queued",
        "same",
        "full",
        "full",
        "full",
    ]
    assert counts(queue)[0] == 2
    end(queue, Worker(queue).lease_one())
    assert [outcome for outcome, _ in submit_all(queue, job("b"), job("c"), job("d"))] == [
        "same",
        "queued",
        "full",
    ]


def test_many_are_bounded_by_the_bytes_they_have_together(queue: Queue) -> None:
    size = len(job("a", prompt="x" * 100).encode())
    client: Any = queue.client
    client.hset(KEYS.meta, "max_bytes", 2 * size)
    asked = [job(name, prompt="x" * 100) for name in "abc"]
    full = Submitted("full", None, 2, 2 * size, calls.DEFAULT_MAX_ENTRIES, 2 * size)
    assert queue.run(calls.submit_all(KEYS, asked)) == [*[Submitted("queued", "queued")] * 2, full]


def test_any_number_is_cut_into_calls_that_hold_the_server_up_for_a_moment(queue: Queue) -> None:
    small = [job(f"s{n}") for n in range(2 * AT_ONCE + 1)]
    large = [job(f"l{n}", prompt="x" * (BYTES_AT_ONCE // 2)) for n in range(3)]
    sizes = [len(answers) for answers in queue.run_all(calls.submit_parts(KEYS, small))]
    assert sizes == [AT_ONCE, AT_ONCE, 1]
    assert [len(answers) for answers in queue.run_all(calls.submit_parts(KEYS, large))] == [1, 1, 1]
    assert calls.submit_parts(KEYS, []) == []
    assert ids_of(Worker(queue).lease(1000)) == [asked.id for asked in [*small, *large]]


@pytest.mark.parametrize("again", [["a"], ["b", "a", "c"]])
def test_a_job_whose_hash_was_deleted_begins_without_its_log(queue: Queue, again: list[str]) -> None:
    """Else its events would be taken for the old ones', and the stream would be torn."""
    put(queue, "a")
    worker = Worker(queue)
    assert say(queue, worker.lease_one(), 1, "old ", "old ").logged == 2
    queue.client.delete(KEYS.job("a"))
    for answer in queue.run(calls.submit_all(KEYS, [job(name) for name in again])):
        assert answer.outcome == "queued"
    assert events_of(queue, "a") == []
    leases = worker.lease(3)
    assert sorted(ids_of(leases)) == sorted(again)
    lease = next(lease for lease in leases if lease.id == "a")
    assert lease.logged == 0
    assert say(queue, lease, 1, "new ").logged == 1
    assert end(queue, lease, 1, "new ") == "ok"
    assert_ended_once(queue, "a")
    for other in leases:
        assert other is lease or end(queue, other) == "ok"
    assert worker.lease() == []
    queue.run(calls.heartbeat(KEYS, "w1", {}))  # clears away what was left of the first one
    assert_drained(queue)


def test_a_repeated_submission_leaves_the_log_alone(queue: Queue) -> None:
    put(queue, "a")
    say(queue, Worker(queue).lease_one(), 1, "x")
    assert [answer.outcome for answer in queue.run(calls.submit_all(KEYS, [job("a"), job("b")]))] == [
        "same",
        "queued",
    ]
    assert len(events_of(queue, "a")) == 1
