"""How much one lease call does of what is due and overdue, and that its reply says when there is more."""

from __future__ import annotations

from typing import Any

from broker import calls
from broker.keys import Keys
from broker.queue import Queue
from tests.broker.steps import Worker, assert_drained, counts, end, job

KEYS = Keys()
MOST_DUE, MOST_ENDED = 500, 200
"""As `standing.lua` and `unowned.lua` have them."""


def put_many(queue: Queue, count: int, prefix: str, **fields: Any) -> list[str]:
    names = [f"{prefix}{number}" for number in range(count)]
    for call in calls.submit_parts(KEYS, [job(name, **fields) for name in names]):
        queue.run(call)
    return names


def come_due(queue: Queue, *names: str) -> None:
    client: Any = queue.client
    client.zadd(KEYS.delayed, dict.fromkeys(names, 1))


def pass_deadlines(queue: Queue, names: list[str], seen_to: int) -> None:
    """`seen_to` of them still have to be looked at by whoever looks at deadlines."""
    client: Any = queue.client
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hset(KEYS.job(name), "deadline", 1)
        pipe.delete(KEYS.deadlines)
        if seen_to:
            pipe.zadd(KEYS.deadlines, dict.fromkeys(names[:seen_to], 1))
        pipe.execute()


def test_a_burst_does_not_end_while_jobs_are_due(queue: Queue) -> None:
    """The first ones have expired while they waited: a call that looks at them alone grants nothing."""
    late = put_many(queue, MOST_DUE + 100, "late", delay_s=3600.0, deadline_in_s=7200.0)
    good = put_many(queue, 5, "good", delay_s=3600.0)
    pass_deadlines(queue, late, 0)
    come_due(queue, *late)
    queue.client.zadd(KEYS.delayed, dict.fromkeys(good, 2))
    worker, ended = Worker(queue), 0
    for _ in range(50):
        asked = worker.ask(80)
        for lease in asked.leases:
            assert end(queue, lease) == "ok"
            ended += 1
        if not asked.leases and asked.next_ms != 0:
            break
    assert ended == len(good)
    assert_drained(queue)


def test_more_deadlines_than_one_call_looks_at_are_more_to_be_had(queue: Queue) -> None:
    late = put_many(queue, 250, "late", deadline_in_s=3600.0)
    pass_deadlines(queue, late, len(late))
    queue.client.delete(KEYS.tenants("normal"))  # none is read from its stream
    worker, left, more = Worker(queue), [], True
    while more:
        more = worker.ask(1).next_ms == 0
        left.append(counts(queue)[0])
    assert left == [150, 50, 0]


def test_one_call_ends_no_more_than_so_many_overdue_jobs(queue: Queue) -> None:
    late = put_many(queue, 1000, "late", deadline_in_s=3600.0)
    pass_deadlines(queue, late, len(late))
    put_many(queue, 3, "good")
    worker, good = Worker(queue), []
    before = counts(queue)[0]
    while len(good) < 3:
        asked = worker.ask(256)
        good += asked.leases
        after = counts(queue)[0]
        assert before - after <= MOST_ENDED
        assert asked.leases or after < before, "it goes on"
        assert len(good) == 3 or asked.next_ms == 0
        before = after
    for lease in good:
        assert end(queue, lease) == "ok"
    while worker.ask(256).next_ms == 0:
        pass
    assert_drained(queue)


def test_a_paused_queue_is_not_asked_again_for_what_is_due(queue: Queue) -> None:
    queue.run(calls.pause(KEYS, True))
    due = put_many(queue, MOST_DUE + 1, "due", delay_s=3600.0)
    come_due(queue, *due)
    asked = Worker(queue).ask()
    assert (asked.leases, asked.paused) == ([], True)
    assert asked.next_ms != 0
