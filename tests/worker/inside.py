"""A whole worker inside the test's process: its parent as it is, its model process a dry run that is stepped here."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker import calls
from broker.connection import connect_async
from broker.keys import Keys
from broker.queue import AsyncQueue, Queue
from engine.dry_run import open_dry_run
from protocol import Job
from worker.child import take_in, to_piece
from worker.frames import Run, Step, ToModel
from worker.model_process import ModelCrashed
from worker.parent import Worker, WorkerSettings
from worker.preparation import Arrived, Inbox, decode, prepare

DEADLINE_S = 20.0


class InsideModel:
    """Does what `worker.model_process.ModelProcess` does, without a process."""

    step_s = 0.005
    """How long a step takes."""
    pid = 0
    load_seconds = 0.0

    def __init__(self) -> None:
        self.inbox: Inbox = queue.SimpleQueue()
        self.dies_of: Exception | None = None
        self._news = asyncio.Event()

    @classmethod
    async def start(cls) -> InsideModel:
        return cls()

    async def load(self, model: str, options: dict[str, Any]) -> None:  # noqa: ARG002
        self.engine = open_dry_run(model)
        self.fingerprint = self.engine.fingerprint
        self.slots = self.engine.max_num_seqs

    def send(self, frame: ToModel) -> None:
        if isinstance(frame, Run):
            if frame.alone:
                self.inbox.put(Arrived(frame.key))
            self.inbox.put(prepare(self.engine, frame, decode(frame)))  # type: ignore[arg-type]
        else:
            self.inbox.put(frame)  # type: ignore[arg-type]
        self._news.set()

    def die(self, error: Exception) -> None:
        """End as soon as it is listened to."""
        self.dies_of = error
        self._news.set()

    async def steps(self, _timeout_s: float, _running_since: object) -> list[Step]:
        while True:
            if self.dies_of is not None:
                raise self.dies_of
            self._news.clear()
            arrived, begun, refused = take_in(self.engine, self.inbox, wait=False)
            pieces = refused
            if not arrived and not begun and not refused and self.engine.has_work():
                await asyncio.sleep(self.step_s)
                if self.dies_of is None:
                    pieces = [to_piece(delta) for delta in self.engine.step()]
            if arrived or begun or pieces:
                stats = self.engine.stats()
                keys = [one.key for one in arrived]
                return [Step(begun, pieces, stats.running, stats.waiting, stats.output_tokens, None, keys)]
            if self.dies_of is None and not self.engine.has_work():
                await self._news.wait()

    async def stop(self) -> None:
        pass


def make_worker(url: str, **settings: Any) -> Worker:
    """A worker with a queue of its own making; give it `run()`."""
    given = {"model": "dry-run:words", "lease_s": 30.0, "grace_s": 10.0, **settings}
    return Worker(AsyncQueue(connect_async(url, Keys()), Keys()), WorkerSettings(**given))


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    """A worker that runs until told to stop, by the test or at its end."""
    task = asyncio.create_task(worker.run())
    try:
        yield task
        worker.stop_now()
        await asyncio.wait_for(task, DEADLINE_S)
    finally:
        task.cancel()
        await asyncio.wait({task})
        await worker._link.queue.close()


def inside(
    patch: pytest.MonkeyPatch, story: Callable[[], Awaitable[None]], model: type[InsideModel] = InsideModel
) -> None:
    """Tell a story in which workers have no model processes."""
    patch.setattr("worker.parent.ModelProcess", model)

    async def told() -> None:
        await asyncio.wait_for(story(), 3 * DEADLINE_S)

    asyncio.run(told())


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds that tasks of this loop make true."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {DEADLINE_S:g} s: {what}") from None


def model_of(worker: Worker) -> InsideModel:
    """The model of a worker that is ready."""
    model: Any = worker._model
    assert isinstance(model, InsideModel)
    return model


CRASH = ModelCrashed("killed by signal 9")


def enqueue(queue: Queue, job_id: str, prompt: str, **fields: Any) -> None:
    """Submit a job, with fields of its own."""
    answer = queue.run(calls.submit(queue.keys, Job(id=job_id, prompt=prompt, **fields)))
    assert answer.outcome == "queued", answer
