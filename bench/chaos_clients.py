"""The people of a chaos run: one submits, others watch or cancel, all through the client library and a bad line."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from bench.chaos_books import Stream
from bench.chaos_jobs import Plan
from bench.chaos_referee import Referee
from millstream import AsyncClient
from protocol import MillstreamError
from protocol.errors import BrokerUnreachable

T = TypeVar("T")

SUBMIT_AT_ONCE = 10
LOOK_AGAIN_S = 0.1
SLOW_S = (0.02, 0.15)
"""What a slow watcher does after each event."""


async def cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks until they are gone: on Python 3.11 redis-py may swallow one that meets the end of a send."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=LOOK_AGAIN_S)


class People:
    """Submits plans in their order, and does with each job what its plan says; it owns what was seen."""

    def __init__(self, client: AsyncClient, referee: Referee, seed: int) -> None:
        self.accepted: dict[str, float] = {}
        """When each job was accepted, in seconds since the run began."""
        self.submitted: dict[str, tuple[float, float]] = {}
        """When each was sent for the first time and when it was accepted, in seconds since the epoch."""
        self.streams: list[Stream] = []
        self.cancelled: dict[str, str] = {}
        """What each cancel was answered."""
        self.repeated = 0
        """Calls and watches that were begun again, because the client library had given up on the server."""
        self._client = client
        self._referee = referee
        self._seed = seed
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def open(self) -> int:
        """Jobs that are accepted and not announced as ended."""
        return len(self.accepted) - len(self._referee.ends)

    def streams_of(self, job_id: str) -> list[Stream]:
        """What watchers of one job saw."""
        return [stream for stream in self.streams if stream.job_id == job_id]

    async def submit(self, plans: Sequence[Plan], room: Callable[[], int]) -> None:
        """Submit all, as many at a time as there is room for."""
        left = list(plans)
        while left:
            count = min(room(), SUBMIT_AT_ONCE)
            if count <= 0:
                await self.an_end(LOOK_AGAIN_S)
                continue
            batch, left = left[:count], left[count:]
            sent = time.time()
            await self._insist(partial(self._client.submit_many, [plan.job for plan in batch]))
            for plan in batch:
                self.submitted[plan.id] = sent, time.time()
                self.accepted[plan.id] = self._referee.now
                if plan.watch is not None:
                    self._begin(self._watch(plan))
                if plan.cancel_after_s is not None:
                    self._begin(self._cancel(plan, plan.cancel_after_s))

    async def an_end(self, timeout_s: float) -> None:
        """Wait for a job to end, or so long."""
        self._referee.news.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._referee.news.wait()
        except TimeoutError:
            pass

    async def leave(self, patience_s: float) -> None:
        """Wait for watchers that have not seen the end yet; who is still there after that has a complaint."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=patience_s)
            await cancel(late)
            for task in set(self._tasks) - late:
                task.result()

    def _begin(self, doing: Awaitable[None]) -> None:
        self._tasks.append(asyncio.ensure_future(doing))

    async def _cancel(self, plan: Plan, after_s: float) -> None:
        await asyncio.sleep(after_s)
        answer, _ = await self._insist(self._client.job(plan.id).cancel)
        self.cancelled[plan.id] = answer

    async def _watch(self, plan: Plan) -> None:
        rng = random.Random(f"watch {self._seed} {plan.id}")
        if plan.watch == "late":
            await asyncio.sleep(rng.uniform(1.0, 5.0))
        elif plan.watch == "after":
            while plan.id not in self._referee.ends:
                await asyncio.sleep(LOOK_AGAIN_S)
        elif plan.watch == "leaves":
            await self._follow(plan, rng, at_most=rng.randint(1, 10))
            await asyncio.sleep(rng.uniform(0.1, 2.0))
        while not await self._follow(plan, rng, at_most=None):
            self.repeated += 1
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _follow(self, plan: Plan, rng: random.Random, at_most: int | None) -> bool:
        """Watch a job from its first event on; False where the client library gave up on the server."""
        assert plan.watch is not None
        stream = Stream(plan.id, plan.watch)
        self.streams.append(stream)
        try:
            async with aclosing(self._client.job(plan.id).stream()) as events:
                async for event in events:
                    stream.events.append(event)
                    stream.arrivals.append(self._referee.now)
                    if plan.watch == "slow":
                        await asyncio.sleep(rng.uniform(*SLOW_S))
                    if len(stream.events) == at_most:
                        return True
            stream.is_whole = True
        except BrokerUnreachable:
            return False
        except asyncio.CancelledError:
            stream.complaint = "its watcher still waits, though the job has ended"
            raise
        except MillstreamError as error:
            stream.complaint = str(error)
        return True

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call until the server has answered: neither a submit nor a cancel does more the second time."""
        while True:
            try:
                return await call()
            except BrokerUnreachable:
                self.repeated += 1
                await asyncio.sleep(LOOK_AGAIN_S)
