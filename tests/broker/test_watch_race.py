"""The race between a job's end and the subscription of whoever follows it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from broker import calls
from broker.connection import connect, connect_async
from broker.keys import Keys
from broker.queue import AsyncQueue, Queue
from broker.watch import SILENCE_S, follow, follow_async
from tests.broker.steps import Worker, end, job, tokens
from tests.servers import RealServer

KEYS = Keys()


class QuickWorker:
    """Ends each job as soon as it is there, in about a millisecond."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        queue = Queue(connect(self._url), KEYS)
        worker = Worker(queue, "quick")
        while not self._stop.is_set():
            for lease in worker.lease(4):
                events = tokens(lease, 1, "a", "b", "c")
                queue.run_all([calls.publish(KEYS, lease.worker, lease.id, lease.attempt, 1, events)])
                end(queue, lease, 3, "abc")
        queue.close()


JOBS = pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.long)])


@JOBS
def test_jobs_that_end_while_their_watcher_subscribes(queue: Queue, server: RealServer, count: int) -> None:
    began = time.monotonic()
    with QuickWorker(server.url):
        for n in range(count):
            queue.run(calls.submit(KEYS, job(f"j{n}")))
            events = list(follow(queue, f"j{n}"))
            assert [event.type for event in events] == ["token"] * 3 + ["done"]
    assert time.monotonic() - began < SILENCE_S * count / 4, "who misses an end looks again after that"


@JOBS
def test_jobs_that_end_while_their_watcher_subscribes_asyncio(server: RealServer, count: int) -> None:
    async def rounds() -> None:
        queue = AsyncQueue(connect_async(server.url), KEYS)
        for n in range(count):
            await queue.run(calls.submit(KEYS, job(f"j{n}")))
            events = [event async for event in follow_async(queue, f"j{n}")]
            assert [event.type for event in events] == ["token"] * 3 + ["done"]
        await queue.close()

    with QuickWorker(server.url):
        asyncio.run(rounds())
