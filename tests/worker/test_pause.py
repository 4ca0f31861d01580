"""A paused queue under a living worker: what runs goes on, nothing else starts, and then all goes on at once."""

from __future__ import annotations

import asyncio

import pytest

from broker import calls
from broker.queue import Queue
from tests.worker.harness import Workers, logged, result, words
from tests.worker.inside import enqueue, inside, make_worker, running, until


def test_a_worker_starts_nothing_while_the_queue_is_paused_and_goes_on_at_once(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told so, it does not wait until it would look again."""
    monkeypatch.setattr("worker.parent.LOOK_AGAIN_S", 60.0)

    async def story() -> None:
        worker = make_worker(workers.url)
        async with running(worker):
            enqueue(queue, "runs", words(5000))
            await until(lambda: logged(queue, "runs") >= 2, "started")
            assert queue.run(calls.pause(queue.keys, True))
            enqueue(queue, "waits", words(3))
            asked = worker._lease_number
            worker._ledger.room_made.set()
            await until(lambda: worker._lease_number > asked, "it has asked")
            at_pause = logged(queue, "runs")
            await until(lambda: logged(queue, "runs") >= at_pause + 5, "what runs goes on")
            look = calls.look(queue.keys, "waits")
            assert (queue.run(look).state, queue.run(look).attempt) == ("queued", 0)
            assert not queue.run(calls.pause(queue.keys, False))
            await until(lambda: queue.run(look).state == "succeeded", "it runs")

    inside(monkeypatch, story)
    assert result(queue, "waits").text == words(3)


def test_a_burst_waits_for_the_jobs_of_a_paused_queue(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would end with exit code 0 beside jobs that nobody ran."""
    monkeypatch.setattr("worker.parent.LOOK_AGAIN_S", 0.05)
    enqueue(queue, "j", words(3))
    assert queue.run(calls.pause(queue.keys, True))

    async def story() -> None:
        worker = make_worker(workers.url, burst=True)
        task = asyncio.create_task(worker.run())
        await until(lambda: worker._lease_number >= 4 or task.done(), "it has asked again and again")
        assert not task.done()
        assert queue.run(calls.look(queue.keys, "j")).attempt == 0
        queue.run(calls.pause(queue.keys, False))
        await asyncio.wait_for(task, 10)

    inside(monkeypatch, story)
    assert result(queue, "j").text == words(3)
    assert sum("the queue is paused, jobs: 1" in line for line in caplog.messages) == 1


def test_a_burst_ends_where_the_paused_queue_is_empty(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert queue.run(calls.pause(queue.keys, True))

    async def story() -> None:
        await asyncio.wait_for(make_worker(workers.url, burst=True).run(), 10)

    inside(monkeypatch, story)
