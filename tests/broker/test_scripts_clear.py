"""Clearing a queue: which jobs it cancels, who is told, and in which pieces."""

from __future__ import annotations

from typing import Any

import pytest

from broker import calls
from broker.calls import Handback
from broker.clearing import Cleared, What, clear_all, clearing
from broker.keys import Keys
from broker.queue import Queue
from tests.broker.steps import (
    LONG_MS,
    Worker,
    assert_drained,
    assert_ended_once,
    clear,
    counts,
    dead_letters,
    end,
    hear,
    ids_of,
    key_names,
    lapse,
    put,
    say,
    told,
)

KEYS = Keys()


def everywhere(queue: Queue) -> Worker:
    """A job in each place, named by it; the worker that runs one."""
    worker = Worker(queue)
    put(queue, "handed-back", "tried-again", "lapsed", "running", run="r")
    for lease in worker.lease(4):
        say(queue, lease, 1, "so ", "far")
    back = [Handback("handed-back", 1), Handback("tried-again", 1, retry_in_ms=LONG_MS)]
    assert queue.run(calls.release(KEYS, "w1", back)) == 2
    lapse(queue, "lapsed")
    put(queue, "in-line", "in-line-2", run="r")
    put(queue, "later", run="r", delay_s=1800.0, deadline_in_s=3600.0)
    return worker


def test_what_waits_ends_and_what_runs_goes_on(queue: Queue) -> None:
    worker = everywhere(queue)
    assert clear(queue, What()) == Cleared(5, 0)
    for name in ("in-line", "in-line-2", "later"):
        result = assert_ended_once(queue, name, "cancelled")
        assert result.error is not None
        assert (result.error.code, result.error.message) == (
            "cancelled",
            "cancelled as its queue was cleared",
        )
    for name in ("handed-back", "tried-again"):
        assert assert_ended_once(queue, name, "cancelled").text == "so far"
    ends = {name: state for entry in told(queue) for name, state in entry.items()}
    assert ends == dict.fromkeys(("in-line", "in-line-2", "later", "handed-back", "tried-again"), "cancelled")
    assert queue.run(calls.renew(KEYS, "w1", LONG_MS, [("running", 1)])) == ["held"]
    (taken,) = worker.lease(5)
    assert (taken.id, taken.attempt) == ("lapsed", 2)
    running = calls.Lease("running", 1, 0, 2, 0, 0, b"", worker="w1")
    for lease in (running, taken):
        assert end(queue, lease, 2, "so far") == "ok"
    assert_drained(queue)
    assert key_names(queue).isdisjoint(
        {KEYS.delayed, KEYS.deadlines, KEYS.leases, KEYS.jobs("normal", "default")}
    )


def test_what_runs_is_marked_if_asked_and_its_owner_ends_it(queue: Queue) -> None:
    everywhere(queue)
    with queue.client.pubsub() as channel:
        channel.subscribe(KEYS.control)
        assert hear(channel, 1, timeout_s=0.05) == []
        assert clear(queue, What(running=True)) == Cleared(6, 1)
        assert "cancel:running" in hear(channel, 1)
    assert queue.run(calls.renew(KEYS, "w1", LONG_MS, [("running", 1)])) == ["cancel"]
    running = calls.Lease("running", 1, 0, 2, 0, 0, b"", worker="w1")
    assert end(queue, running, 2, "so far", state="cancelled") == "ok"
    assert_drained(queue)


@pytest.mark.parametrize(
    ("what", "left"),
    [
        (What(priority="low"), {"n-t", "n-u", "n-t-later"}),
        (What(tenant="t"), {"n-u", "l-u", "l-u-later"}),
        (What(priority="normal", tenant="t"), {"n-u", "l-t", "l-u", "l-u-later"}),
        (What(priority="high"), {"n-t", "n-u", "l-t", "l-u", "n-t-later", "l-u-later"}),
        (What(), set()),
    ],
)
def test_only_what_was_asked_for(queue: Queue, what: What, left: set[str]) -> None:
    for tenant in ("t", "u"):
        put(queue, f"n-{tenant}", tenant=tenant)
        put(queue, f"l-{tenant}", tenant=tenant, priority="low")
    put(queue, "n-t-later", tenant="t", delay_s=60.0)
    put(queue, "l-u-later", tenant="u", priority="low", delay_s=60.0)
    assert clear(queue, what) == Cleared(6 - len(left), 0)
    assert counts(queue)[0] == len(left)
    queue.client.zadd(KEYS.delayed, {"n-t-later": 1, "l-u-later": 1}, xx=True)
    assert set(ids_of(Worker(queue).lease(9))) == left


def test_what_begins_to_run_meanwhile_is_marked_too(queue: Queue) -> None:
    """A worker that ends what was marked leases what lies in line, before its slice comes."""
    put(queue, *[f"j{n}" for n in range(120)])
    worker = Worker(queue)
    held = worker.lease(8)
    marked = []

    def run(call: Any) -> Any:
        reply = queue.run(call)
        pairs = [(lease.id, lease.attempt) for lease in held]
        for lease, answer in list(zip(held, queue.run(calls.renew(KEYS, "w1", LONG_MS, pairs)), strict=True)):
            if answer == "cancel":
                assert end(queue, lease, state="cancelled") == "ok"
                marked.append(lease.id)
                held.remove(lease)
        held.extend(worker.lease(8 - len(held)))
        return reply

    assert clear_all(run, KEYS, What(running=True)) == Cleared(120 - len(marked), len(marked))
    assert len(marked) > 8
    assert held == []
    assert_drained(queue)


@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("place", ["delayed", "leases"])
def test_what_is_put_in_line_meanwhile_is_cancelled_too(queue: Queue, others: int, place: str) -> None:
    """A job that waited from the beginning on, of a tenant that has no stream when the places are listed."""
    put(queue, "a", *[f"j{n}" for n in range(others)])
    put(queue, "late", tenant="t", delay_s=60.0)
    client: Any = queue.client

    def run(call: Any) -> Any:
        if place in call.args and client.zscore(KEYS.delayed, "late") is not None:
            client.zadd(KEYS.delayed, {"late": 1})
            queue.run(calls.heartbeat(KEYS, "w1", {}))
        return queue.run(call)

    cleared = clear_all(run, KEYS, What())
    assert cleared == Cleared(2 + others, 0)
    assert_ended_once(queue, "late", "cancelled")
    assert_drained(queue)


def test_what_is_marked_is_counted_once(queue: Queue) -> None:
    """Though the job is met where leases and where entries stand, and at the second clearing."""
    put(queue, "a")
    lease = Worker(queue).lease_one()
    assert clear(queue, What(running=True)) == Cleared(0, 1)
    assert clear(queue, What(running=True)) == Cleared(0, 0)
    lapse(queue, "a")
    assert clear(queue, What(running=True)) == Cleared(1, 0)
    assert end(queue, lease) == "lost"
    assert_drained(queue)


def test_many_are_cancelled_in_pieces(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"j{n}" for n in range(350)]
    put(queue, *names[:250])
    put(queue, *names[250:], delay_s=60.0)
    running = Worker(queue).lease(30)
    pieces: list[int] = []
    run: Any = queue.run

    def counted(call: Any) -> Any:
        reply = run(call)
        if isinstance(reply, tuple):
            pieces.append(reply[0].cancelled)
        return reply

    monkeypatch.setattr(queue, "run", counted)
    assert clear(queue, What()) == Cleared(320, 0)
    assert max(pieces) <= 128  # a small sorted set comes in one piece
    for lease in running:
        end(queue, lease)
    assert_drained(queue)


def test_long_logs_are_cancelled_a_few_a_call(queue: Queue) -> None:
    """Reading what was logged takes the server's time: it goes on with the next call."""
    put(queue, "a", "b", "c")
    worker = Worker(queue)
    for lease in worker.lease(3):
        say(queue, lease, 1, *["x"] * 1500)
        queue.run(calls.release(KEYS, "w1", [Handback(lease.id, 1)]))
    steps = clearing(KEYS, What())
    places = queue.run(next(steps))
    assert places[:2] == ["delayed", "leases"]
    assert queue.run(steps.send(places)) == (Cleared(0, 0), "")
    assert queue.run(steps.send((Cleared(0, 0), ""))) == places
    first = queue.run(steps.send(places))
    assert first == (Cleared(2, 0), "0")
    assert clear(queue, What()) == Cleared(1, 0)
    assert [assert_ended_once(queue, name, "cancelled").text for name in "abc"] == ["x" * 1500] * 3
    assert_drained(queue)


def test_what_is_no_job_is_left_to_the_next_lease(queue: Queue) -> None:
    put(queue, "a")
    client: Any = queue.client
    client.xadd(KEYS.jobs("normal", "default"), {"x": "y"})
    client.xadd(KEYS.jobs("normal", "default"), {"id": "nobody"})
    assert clear(queue, What()) == Cleared(1, 0)
    assert Worker(queue).lease(5) == []
    assert sorted(letter["reason"] for letter in dead_letters(queue)) == [b"lost_payload", b"not_a_job"]
    assert_drained(queue)


def test_an_empty_queue(queue: Queue) -> None:
    assert clear(queue, What(running=True)) == Cleared(0, 0)
    assert key_names(queue) == set()
