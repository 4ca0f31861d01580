"""A job whose log is too long for a script to end it: who serves the queue ends it at once, with all of its text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker import calls
from broker.calls import Handback
from broker.queue import Queue
from protocol import Job, encode_token
from tests.worker.harness import ON_BOTH_SERVERS, Workers, ended, nothing_left

LONG = 6000


def written(queue: Queue, job_id: str, deadline_in_s: float | None = None) -> None:
    """A job that another worker has made that much of, and handed back."""
    keys = queue.keys
    job = Job(id=job_id, prompt="x " * 9000, params={"max_tokens": 8000}, deadline_in_s=deadline_in_s)
    queue.run(calls.submit(keys, job))
    (lease,) = queue.run(calls.lease(keys, f"of-{job_id}", 1, 1, 60_000)).leases
    for first in range(1, LONG + 1, 1000):
        said = [encode_token(job_id, seq, 1, 0, "x ", [seq]) for seq in range(first, first + 1000)]
        queue.run(calls.publish(keys, lease.worker, job_id, 1, first, said))
    queue.run(calls.release(keys, lease.worker, [Handback(job_id, 1)]))


def cancelled(queue: Queue) -> None:
    assert queue.run(calls.cancel(queue.keys, "a")) == ("cancelling", None)


def overdue(queue: Queue) -> None:
    queue.client.hset(queue.keys.job("a"), "deadline", 1)
    queue.client.zadd(queue.keys.deadlines, {"a": 1})


@ON_BOTH_SERVERS
@pytest.mark.parametrize(("state", "happens"), [("cancelled", cancelled), ("expired", overdue)])
@pytest.mark.parametrize("serving", [False, True])
def test_it_ends_at_once(
    queue: Queue, workers: Workers, state: str, happens: Callable[[Queue], None], serving: bool
) -> None:
    """A word takes a second: it is not gone on with. A worker that idles meanwhile is woken."""
    model = "dry-run:words?delay=1s"
    written(queue, "a", deadline_in_s=3600.0)
    queue.run(calls.pause(queue.keys, True))
    if serving:
        workers.start(model=model).ready()
    happens(queue)
    queue.run(calls.look(queue.keys, "a"))
    queue.run(calls.pause(queue.keys, False))
    if not serving:
        workers.start(model=model).ready()
    stored = ended(queue, "a")
    assert stored.state == state
    assert stored.text == "x " * LONG
    assert stored.attempt == 2
    nothing_left(queue)
