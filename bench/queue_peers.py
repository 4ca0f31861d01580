"""Other queues, each run by the interpreter in which it is installed: one process submits, one works.

python -m bench.queue_peers NAME URL submit COUNT RATE     RATE jobs a second; 0: all at once. Prints what it took
python -m bench.queue_peers NAME URL work COUNT            prints as `queue_job.Tally` does, until it is ended

`bench.queue` drives it; nothing of ours is imported but the job. They are set up to do well: batches where a queue
has them, as many jobs at once as our worker has slots, async jobs, results kept for an hour, no logging of jobs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from bench.queue_job import PROMPT, TALLY, answer, answer_arq, answer_async

AT_ONCE = 256
"""Jobs that a worker runs at once; the dry run's slots."""
BATCH = 500
KEEP_S = 3600

Submit = Callable[[int], Awaitable[None]]
"""Queue that many jobs in one go."""


class Rq:
    """`SimpleWorker`: it runs jobs in its own process. One at a time; rq has no other way."""

    @asynccontextmanager
    async def client(self, url: str) -> AsyncIterator[Submit]:
        from redis import Redis
        from rq import Queue

        queue = Queue(connection=Redis.from_url(url))

        async def submit(count: int) -> None:
            jobs = [
                Queue.prepare_data(answer, (PROMPT, time.time()), result_ttl=KEEP_S) for _ in range(count)
            ]
            queue.enqueue_many(jobs)

        yield submit

    def work(self, url: str) -> None:
        from redis import Redis
        from rq import Queue, SimpleWorker

        connection = Redis.from_url(url)
        SimpleWorker([Queue(connection=connection)], connection=connection).work(logging_level="WARNING")


class Arq:
    """arq: asyncio, msgpack or pickle over sorted sets."""

    @asynccontextmanager
    async def client(self, url: str) -> AsyncIterator[Submit]:
        from arq import create_pool
        from arq.connections import RedisSettings

        pool = await create_pool(RedisSettings.from_dsn(url))

        async def submit(count: int) -> None:
            jobs = [pool.enqueue_job("answer_arq", PROMPT, time.time()) for _ in range(count)]
            await asyncio.gather(*jobs)

        yield submit
        await pool.aclose()

    def work(self, url: str) -> None:
        from arq.connections import RedisSettings
        from arq.worker import Worker

        asyncio.set_event_loop(asyncio.new_event_loop())
        settings = RedisSettings.from_dsn(url)
        Worker(
            functions=[answer_arq],
            redis_settings=settings,
            max_jobs=AT_ONCE,
            keep_result=KEEP_S,
            log_results=False,
        ).run()


class DocketQueue:
    """docket: asyncio over streams."""

    @asynccontextmanager
    async def client(self, url: str) -> AsyncIterator[Submit]:
        from datetime import UTC, datetime
        from uuid import uuid4

        from docket import Docket
        from docket.docket import TaskCall

        def call() -> Any:
            now = datetime.now(UTC)
            return TaskCall(answer_async, (PROMPT, now.timestamp()), {}, uuid4().hex, now)

        async with Docket(url=url) as docket:
            docket.register(answer_async)

            async def submit(count: int) -> None:
                await docket.add_many([call() for _ in range(count)])

            yield submit

    def work(self, url: str) -> None:
        from docket import Docket, Worker

        async def run() -> None:
            async with Docket(url=url) as docket:
                docket.register(answer_async)
                # More at once run out of its pool's 100 connections, and then it stands still.
                async with Worker(docket, concurrency=50) as worker:
                    await worker.run_forever()

        asyncio.run(run())


class Streaq:
    """streaq: anyio over streams, with Lua scripts."""

    def _queue(self, url: str) -> tuple[Any, Any]:
        from streaq import Worker

        worker: Any = Worker(redis_url=url, concurrency=AT_ONCE)
        return worker, worker.task(expire=KEEP_S, silent=True)(answer_async)

    @asynccontextmanager
    async def client(self, url: str) -> AsyncIterator[Submit]:
        worker, task = self._queue(url)
        async with worker:

            async def submit(count: int) -> None:
                await worker.enqueue_many([task.enqueue(PROMPT, time.time()) for _ in range(count)])

            yield submit

    def work(self, url: str) -> None:
        self._queue(url)[0].run_sync()


PEERS: dict[str, Any] = {"rq": Rq(), "arq": Arq(), "docket": DocketQueue(), "streaq": Streaq()}
MODULES = {"rq": "rq", "arq": "arq", "docket": "pydocket", "streaq": "streaq"}
"""As their packages are named."""


async def submit_paced(submit: Submit, count: int, rate: float) -> float:
    """Queue `count` jobs, `rate` a second one by one, or 0: as fast as it goes. The seconds that took."""
    began = time.monotonic()
    size = 1 if rate else BATCH
    for first in range(0, count, size):
        if rate:
            await asyncio.sleep(max(0.0, began + first / rate - time.monotonic()))
        await submit(min(size, count - first))
    return time.monotonic() - began


async def _submit(peer: Any, url: str, count: int, rate: float) -> float:
    async with peer.client(url) as submit:
        return await submit_paced(submit, count, rate)


def main(name: str, url: str, what: str, count: str, rate: str = "0") -> None:
    """One process of a peer's."""
    from importlib.metadata import version

    logging.basicConfig(level=logging.WARNING)
    if what == "submit":
        seconds = asyncio.run(_submit(PEERS[name], url, int(count), float(rate)))
        versions = f"{MODULES[name]} {version(MODULES[name])}"
        print(json.dumps({"seconds": seconds, "versions": versions}))
    else:
        TALLY.expected = int(count)
        PEERS[name].work(url)


if __name__ == "__main__":
    main(*sys.argv[1:])
