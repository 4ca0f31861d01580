"""The worker's parent: joins the queue and the model process.

lease loop    room in the engine -> leases -> model process
pump          steps of the model process -> events and ends -> Redis, one pipeline a step
renew loop    leases kept alive, three times in their length
beat loop     a sign of life, with numbers
listener      wake-ups and cancels, hints only
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from broker import calls
from broker.calls import Leased
from broker.failpoints import reached
from broker.queue import AsyncQueue
from protocol import ModelMismatch
from worker.figures import WINDOW_S, Figures
from worker.frames import Step, ToModel
from worker.ledger import Ledger
from worker.link import Link
from worker.model_process import ModelCrashed, ModelProcess
from worker.rate import Rate

log = logging.getLogger("millstream.worker")

LOOK_AGAIN_S = 2.0
"""An idle worker looks for work this often, should a wake-up be lost; lapsed leases are noticed this late."""
BEAT_S = 3.0
LOADS_IN_A_ROW = 3
"""Model processes that may die while they load before the worker gives up."""
LEAVE_S = 10.0
"""How long a worker that stops waits for a Redis that is away before it leaves its leases to lapse."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker is told when it starts."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    lease_s: float = 30.0
    grace_s: float = 30.0
    step_timeout_s: float = 600.0
    burst: bool = False
    """Stop once the queue is empty."""


class Worker:
    """One worker of one queue, from its start to its end."""

    def __init__(self, queue: AsyncQueue, settings: WorkerSettings) -> None:
        self.id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._settings = settings
        self._link = Link(queue)
        self._keys = queue.keys
        self._ledger = Ledger(self._link, self.id, self._to_model)
        self._model: ModelProcess | None = None
        self._lease_number = 0
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._last_step = Step([], [], 0, 0, 0)
        self._rate = Rate()
        self._figures = Figures()

    async def run(self) -> None:
        """Load, serve until told to stop (or, in a burst, until the queue is empty), hand back what is left.

        Raises:
            ModelUnavailable: the model cannot be loaded.
            OptionRefused: it cannot with these options.
            ModelMismatch: the queue serves another model.
            ModelCrashed: the model process dies again and again while it loads.
            redis.RedisError: the server refuses what a worker must be able to do.
        """
        loops = [self._lease_loop(), self._pump(), self._renew_loop(), self._beat_loop(), self._listen()]
        tasks = [asyncio.create_task(loop) for loop in loops]
        drained = asyncio.create_task(self._drain())
        try:
            await asyncio.wait([*tasks, drained], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await _cancel([*tasks, drained])
            await self._leave()

    def stop(self) -> None:
        """First call: no new leases, finish what fits in the grace time. Second: hand everything back now."""
        if self._stopping.is_set():
            self._hurry.set()
        else:
            log.info("stopping: %d jobs held, grace %g s", len(self._ledger), self._settings.grace_s)
            self._stopping.set()

    def stop_now(self) -> None:
        """Hand everything back now."""
        self._stopping.set()
        self._hurry.set()

    async def _drain(self) -> None:
        await self._stopping.wait()
        await _first_of(self._ledger.empty, self._hurry, timeout_s=self._settings.grace_s)

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._ledger.hand_back(crashed=False)
                client: Any = self._link.queue.client
                await self._link.insist(lambda: client.hdel(self._keys.workers, self.id))
        except TimeoutError:
            lease_s = self._settings.lease_s
            log.warning("redis is away: %d leases lapse within %g s", len(self._ledger), lease_s)
        finally:
            if self._model is not None:
                await self._model.stop()
        log.info("stopped")

    # -- the model process -------------------------------------------------------------------------------------

    async def _load_model(self) -> None:
        model = await self._start_model()
        try:
            await self._register(model)
        except ModelMismatch:
            await model.stop()
            raise
        self._model = model
        self._ledger.model_name = model.fingerprint.name
        self._ledger.run_again()
        await self._beat()
        log.info(
            "ready: %s on queue %s, %d slots, loaded in %.1f s, model process %d",
            model.fingerprint,
            self._keys.queue,
            model.slots,
            model.load_seconds,
            model.pid,
        )
        self._ledger.room_made.set()

    async def _register(self, model: ModelProcess) -> None:
        other = await self._link.run(calls.register(self._keys, self.id, model.fingerprint))
        if other is not None:
            raise ModelMismatch(
                f"queue {self._keys.queue} serves {other}, this worker has {model.fingerprint}: "
                "use another --queue, or the same model, dtype and quantisation"
            )

    async def _start_model(self) -> ModelProcess:
        for load in range(1, LOADS_IN_A_ROW):
            try:
                return await self._start_once()
            except ModelCrashed as error:
                log.error(
                    "the model process died while it loaded (%d of %d): %s", load, LOADS_IN_A_ROW, error
                )
        return await self._start_once()

    async def _start_once(self) -> ModelProcess:
        log.info("loading %s", self._settings.model)
        return await ModelProcess.start(self._settings.model, self._settings.options)

    async def _pump(self) -> None:
        await self._load_model()
        while True:
            model = self._model
            if model is None:
                raise RuntimeError("no model process")
            try:
                step = await model.step(self._settings.step_timeout_s, lambda: self._ledger.running_since)
            except ModelCrashed as error:
                await self._replace_model(model, error)
                continue
            self._last_step = step
            self._rate.note(step.output_tokens)
            if step.counters is not None:
                self._figures.note(step.counters)
            await self._ledger.tell(step)

    async def _replace_model(self, dead: ModelProcess, error: ModelCrashed) -> None:
        self._model = None
        log.error("the model process died (%s) with %d jobs running", error, self._ledger.running)
        await dead.stop()
        await self._ledger.convict()
        await self._ledger.hand_back(crashed=True)
        self._rate = Rate()
        self._figures = Figures()
        await self._load_model()

    def _to_model(self, frame: ToModel) -> bool:
        """Whether it was sent. Between two model processes nothing is: the next one is given what is held."""
        if self._model is not None:
            self._model.send(frame)
        return self._model is not None

    # -- leases ------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """Jobs to ask for: what the engine can run, and a small waiting window so that no slot stands empty.

        A job counts as many sequences as it has choices that run, once it is known how many.
        """
        if self._model is None or self._stopping.is_set() or self._ledger.quarantined:
            return 0
        return self._model.slots + max(1, self._model.slots // 4) - self._ledger.sequences

    async def _lease_loop(self) -> None:
        while True:
            self._ledger.room_made.clear()
            asked = self._room()
            leased = await self._lease(asked) if asked > 0 else Leased([], None)
            if leased.leases:
                reached("leased")
            await self._ledger.take(leased.leases)
            nothing_left = asked > 0 and not self._ledger and leased.next_ms is None
            if self._settings.burst and nothing_left and not self._stopping.is_set():
                log.info("the queue is empty")
                self.stop()
            if not leased.leases or len(leased.leases) < asked:
                next_s = LOOK_AGAIN_S if leased.next_ms is None else leased.next_ms / 1000
                await _first_of(self._ledger.room_made, timeout_s=min(LOOK_AGAIN_S, next_s))

    async def _lease(self, count: int) -> Leased:
        self._lease_number += 1
        lease_ms = int(self._settings.lease_s * 1000)
        return await self._link.run(calls.lease(self._keys, self.id, self._lease_number, count, lease_ms))

    async def _renew_loop(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            await self._ledger.renew(int(self._settings.lease_s * 1000))

    # -- signs and hints ---------------------------------------------------------------------------------------

    async def _beat_loop(self) -> None:
        said = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            if self._ledger.model_name:  # not before the first model is loaded
                await self._beat()
            if time.monotonic() - said >= WINDOW_S:
                said = time.monotonic()
                line = self._figures.line()
                if line is not None:
                    log.info("%s", line)

    async def _beat(self) -> None:
        info = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "model": self._ledger.model_name,
            "running": self._last_step.running,
            "waiting": self._last_step.waiting,
            "held": len(self._ledger),
            "slots": self._model.slots if self._model is not None else 0,
            "output_tokens": self._last_step.output_tokens,
            "tokens_per_s": round(self._rate.per_second(), 1),
            "engine": dict(self._figures.now),
            "lately": self._figures.lately(),
        }
        answer = await self._link.run(calls.heartbeat(self._keys, self.id, info))
        if answer == "unknown" and self._model is not None:
            log.warning("queue %s has forgotten this worker: registering again", self._keys.queue)
            await self._register(self._model)

    async def _listen(self) -> None:
        """Hear wake-ups and cancels. A hint that is missed is made good by the next look, renewal or publish."""
        async with aclosing(self._link.hints()) as hints:
            async for hint in hints:
                await self._heed(hint)

    async def _heed(self, hint: str) -> None:
        if hint == "wake":
            self._ledger.room_made.set()
        elif hint.startswith("cancel:"):
            await self._ledger.cancel(hint.removeprefix("cancel:"))


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks until they are gone.

    Once is not enough on Python 3.11: redis-py sends under `asyncio.wait_for`, which may swallow a cancellation that
    meets the end of the send (measured: 47 of 600).
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.2)


async def _first_of(*events: asyncio.Event, timeout_s: float) -> None:
    """Return when one of the events is set, or after the timeout."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
