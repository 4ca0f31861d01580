"""Hints that a worker could not hear: a cancel is heeded within a step all the same, and a wake-up at once.

Of a job that nobody streams nothing is said for many steps, so only a renewal would tell, ten seconds later.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker import calls
from broker.queue import Queue
from tests.worker.harness import Workers, result, words
from tests.worker.inside import enqueue, inside, make_worker, running, until
from worker.held import CHECKPOINT_TOKENS

FEW_STEPS = CHECKPOINT_TOKENS // 2
"""Fewer than after which something of the job is logged: its owner would be told then."""


def stopped_at_once(queue: Queue) -> None:
    stored = result(queue, "j")
    assert stored.state == "cancelled"
    assert sum(len(choice.token_ids) for choice in stored.choices) < FEW_STEPS


def test_a_job_that_is_cancelled_while_its_lease_is_on_its_way(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granted on the server, and not yet held: the cancel overtakes the grant."""

    async def story() -> None:
        worker = make_worker(workers.url)
        run, cancel = worker._link.queue.run, worker._ledger.cancel
        granted, heard = asyncio.Event(), asyncio.Event()

        async def slow(call: Any) -> Any:
            reply = await run(call)
            if getattr(reply, "leases", None):
                granted.set()
                await heard.wait()
            return reply

        def note(job_id: str) -> None:
            cancel(job_id)
            heard.set()

        monkeypatch.setattr(worker._link.queue, "run", slow)
        monkeypatch.setattr(worker._ledger, "cancel", note)
        async with running(worker):
            await until(lambda: worker._model is not None, "ready")
            enqueue(queue, "j", words(5000), stream=False)
            await granted.wait()
            assert queue.run(calls.cancel(queue.keys, "j")) == ("cancelling", None)
            await until(lambda: queue.run(calls.look(queue.keys, "j")).state == "cancelled", "stopped")

    inside(monkeypatch, story)
    stopped_at_once(queue)


def test_a_job_that_is_cancelled_while_its_worker_is_not_subscribed(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py subscribes again by itself, and says nothing but that it has."""

    async def story() -> None:
        worker = make_worker(workers.url)
        async with running(worker):
            enqueue(queue, "j", words(5000), stream=False)
            await until(lambda: worker._ledger.running == 1, "it runs")
            client: Any = queue.client
            await until(lambda: client.pubsub_numsub(queue.keys.control)[0][1] == 1, "it listens")
            assert client.client_kill_filter(_type="pubsub") == 1
            assert queue.run(calls.cancel(queue.keys, "j")) == ("cancelling", None)
            await until(lambda: queue.run(calls.look(queue.keys, "j")).state == "cancelled", "stopped")

    inside(monkeypatch, story)
    stopped_at_once(queue)


def test_a_wake_up_while_its_worker_is_not_subscribed(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for work once it hears again, not when it would have looked anyway."""
    monkeypatch.setattr("worker.parent.LOOK_AGAIN_S", 60.0)

    async def story() -> None:
        async with running(make_worker(workers.url)):
            client: Any = queue.client
            await until(lambda: client.pubsub_numsub(queue.keys.control)[0][1] == 1, "it listens")
            asked = queue.keys.meta
            await until(lambda: client.hget(asked, "hungry") == b"1", "it has looked, in vain")
            assert client.client_kill_filter(_type="pubsub") == 1
            enqueue(queue, "j", words(3))
            await until(lambda: queue.run(calls.look(queue.keys, "j")).state == "succeeded", "it runs")

    inside(monkeypatch, story)
