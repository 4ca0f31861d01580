"""The worker's parent: joins the queue and the model process.

lease loop    room in the engine -> leases -> model process; ends when the worker is told to stop
pump          steps of the model process -> events and ends -> Redis, all that have come in one pipeline
renew loop    leases kept alive, three times in their length
stops         jobs stopped when they are cancelled or their time has come
beat loop     a sign of life, with numbers
listener      wake-ups and cancels, hints only

    told to stop      no new leases; what is held goes on, for the grace time at most, or until told again
    then              what is left is logged and handed back, and the loops end
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Awaitable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import redis

from broker import calls
from broker.calls import Leased
from broker.failpoints import reached
from broker.faults import passes
from broker.loading import leave, note_loading
from broker.queue import AsyncQueue
from engine.interface import DeviceLost
from protocol import ModelMismatch
from worker.figures import WINDOW_S, Figures
from worker.frames import Step, ToModel
from worker.ledger import Ledger
from worker.link import LONGEST_WAIT_S, SUBSCRIBED, Link
from worker.model_process import ModelCrashed, ModelProcess
from worker.restarts import Restarts
from worker.waiting import cancel_all, first_of

log = logging.getLogger("millstream.worker")

LOOK_AGAIN_S = 2.0
"""A worker with room looks for work this often, should a wake-up be lost; sooner where something falls due sooner."""
COURTESY_S = LONGEST_WAIT_S + 0.5
"""After an outage in which leases may have lapsed nobody takes any for so long: their owners live, and each renews
them as soon as it finds the server back, which may take it `LONGEST_WAIT_S`."""
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
        self._process: ModelProcess | None = None
        """The model process that was started last; it may still load."""
        self._model: ModelProcess | None = None
        """The one that serves."""
        self._lease_number = 0
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._last_step = Step([], [], 0, 0, 0)
        self._figures = Figures()
        self._restarts = Restarts()
        self._has_told_pause = False

    async def run(self) -> None:
        """Load, serve until told to stop (or, in a burst, until the queue is empty), hand back what is left.

        Raises:
            ModelUnavailable: the model cannot be loaded.
            OptionRefused: it cannot with these options.
            ModelMismatch: the queue serves another model.
            ModelCrashed: the model process dies again and again while it loads.
            ModelGivenUp: it does so while it runs.
            redis.RedisError: the server refuses what a worker must be able to do.
        """
        leasing = asyncio.create_task(self._lease_loop())
        drained = asyncio.create_task(self._drain(leasing))
        loops = [self._pump(), self._renew_loop(), self._ledger.stop_in_time()]
        loops += [self._beat_loop(), self._listen()]
        tasks = [leasing, drained, *map(asyncio.create_task, loops)]
        try:
            going = set(tasks)
            while not drained.done():
                ended, going = await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
        finally:
            await self._leave(leasing, tasks)

    async def wait_for_server(self, ready: Awaitable[None]) -> bool:
        """Wait until the server is ready, or the worker is told to stop; whether it is ready."""
        waiting = asyncio.ensure_future(ready)
        told = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({waiting, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not waiting.done():
            await cancel_all([waiting])
            return False
        waiting.result()
        return True

    def stop(self) -> None:
        """First call: no new leases, finish what fits in the grace time. Second: hand everything back now."""
        if self._stopping.is_set():
            self._hurry.set()
        else:
            log.info("stopping, grace %g s; jobs held: %d", self._settings.grace_s, len(self._ledger))
            self._stopping.set()

    def stop_now(self) -> None:
        """Hand everything back now."""
        self._stopping.set()
        self._hurry.set()

    async def _drain(self, leasing: asyncio.Task[None]) -> None:
        """Once told to stop, wait for what is held, which is all of it when the last lease call has its answer."""
        await self._stopping.wait()
        hurried = asyncio.create_task(self._hurry.wait())
        finished = asyncio.create_task(self._finish(leasing))
        try:
            await asyncio.wait(
                {hurried, finished}, timeout=self._settings.grace_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            await cancel_all([hurried, finished])

    async def _finish(self, leasing: asyncio.Task[None]) -> None:
        await asyncio.wait({leasing})
        await self._ledger.empty.wait()

    async def _leave(self, leasing: asyncio.Task[None], tasks: list[asyncio.Task[None]]) -> None:
        """Hand back what is held, then end every loop: nothing is in the middle of being said."""
        self._stopping.set()
        try:
            async with asyncio.timeout(LEAVE_S):
                await asyncio.wait({leasing})
                await self._ledger.hand_back()
                await cancel_all(tasks)
                await self._link.run(leave(self._keys, self.id))
        except TimeoutError:
            lease_s = self._settings.lease_s
            log.warning("redis is away: %d leases lapse within %g s", len(self._ledger), lease_s)
        finally:
            await cancel_all(tasks)
            if self._process is not None:
                await self._process.stop()
        log.info("stopped")

    # -- the model process -------------------------------------------------------------------------------------

    async def _load_model(self) -> None:
        model = await self._start_model()
        await self._register(model)
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
                "use another --queue, or the same model, dtype and quantisation. A queue takes another model "
                "once its jobs have ended and its workers are gone (`millstream status`)"
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
        """Whatever comes in between, `_leave` ends the process."""
        log.info("loading %s", self._settings.model)
        if self._process is not None:
            await self._process.stop()
        self._process = await ModelProcess.start()
        await self._process.load(self._settings.model, self._settings.options)
        return self._process

    async def _pump(self) -> None:
        await self._load_model()
        while True:
            model = self._model
            if model is None:
                raise RuntimeError("no model process")
            try:
                steps = await model.steps(self._settings.step_timeout_s, lambda: self._ledger.running_since)
            except (ModelCrashed, DeviceLost) as error:
                await self._replace_model(model, error)
                continue
            self._last_step = steps[-1]
            for step in steps:
                if step.counters is not None:
                    self._figures.note(step.counters)
            await self._ledger.tell(steps)

    async def _replace_model(self, dead: ModelProcess, error: ModelCrashed | DeviceLost) -> None:
        self._model = None
        happened = "died" if isinstance(error, ModelCrashed) else "has given up its device"
        count = self._restarts.note(error, self._ledger.num_finished)
        log.error(
            "the model process %s (%s), %s in a row without a finished job; jobs running: %d",
            happened,
            error,
            count,
            self._ledger.running,
        )
        await dead.stop()
        await self._ledger.convict(error)
        if isinstance(error, ModelCrashed):
            await self._ledger.hand_back_crashed()
        else:
            await self._ledger.hand_back_for_later()
        self._restarts.check(error)
        self._figures = Figures()
        await self._load_model()

    def _to_model(self, said: ToModel) -> bool:
        """Whether it was sent. Between two model processes nothing is: the next one is given what is held."""
        if self._model is not None:
            self._model.send(said)
        return self._model is not None

    # -- leases ------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """Jobs to ask for: what the engine can run, and a small waiting window so that no slot stands empty.

        A job counts as many sequences as it has choices that run, once it is known how many. Nothing is asked for
        before half of the window is free: a call costs the worker some 300 us, however many jobs it brings.
        """
        if self._model is None or self._stopping.is_set() or self._ledger.quarantined:
            return 0
        window = max(1, self._model.slots // 4)
        room = self._model.slots + window - self._ledger.sequences
        return room if 2 * room >= window else 0

    async def _lease_loop(self) -> None:
        while not self._stopping.is_set():
            self._ledger.room_made.clear()
            asked = self._room()
            leased = await self._lease(asked) if asked > 0 else Leased([], None)
            if leased.leases:
                reached("leased")
            await self._ledger.take(leased.leases)
            if self._settings.burst and asked > 0 and self._is_over(leased) and not self._stopping.is_set():
                await self._end_burst(leased.paused)
            if not leased.leases or len(leased.leases) < asked:
                next_s = LOOK_AGAIN_S if leased.next_ms is None else leased.next_ms / 1000
                timeout_s = min(LOOK_AGAIN_S, next_s)
                await first_of(self._ledger.room_made, self._stopping, timeout_s=timeout_s)

    def _is_over(self, leased: Leased) -> bool:
        """Whether a burst ends: nothing is held, and nothing falls due within a lease's time or is tried again.

        A job that another worker runs comes up when its lease lapses, should that worker die; one that is not to
        start for longer than that is left to others.
        """
        if self._ledger:
            return False
        soon_s = max(self._settings.lease_s, self._ledger.retried_until - time.monotonic())
        return leased.next_ms is None or leased.next_ms > 1000 * soon_s

    async def _end_burst(self, is_paused: bool) -> None:
        """Stop, unless the queue has jobs and grants none since it is paused: these are waited for."""
        client: Any = self._link.queue.client
        jobs = is_paused and int(
            await self._link.insist(lambda: client.hget(self._keys.meta, "entries")) or 0
        )
        if not jobs:
            log.info("nothing is waiting, running or due")
            self.stop()
        elif not self._has_told_pause:
            self._has_told_pause = True
            log.warning("the queue is paused, jobs: %d; waiting for `millstream queue resume`", jobs)

    async def _lease(self, count: int) -> Leased:
        """Ask for jobs, waiting for a server that is away."""
        self._lease_number += 1
        self._ledger.forget_hints()
        call = calls.lease(self._keys, self.id, self._lease_number, count, self._lease_ms)
        await self._let_owners_renew()
        try:
            return await self._link.queue.run(call)
        except (redis.RedisError, OSError) as error:
            if not passes(error):
                raise
        await self._beat()  # returns once the server is back
        await self._let_owners_renew()
        if self._stopping.is_set():  # no more than what was granted and not heard of
            call = calls.lease(self._keys, self.id, self._lease_number, 0, self._lease_ms)
        return await self._link.run(call)

    async def _let_owners_renew(self) -> None:
        """After an outage in which leases may have lapsed: renew ours, and leave the others to their owners."""
        away_s, back_s = self._link.last_trouble()
        if back_s < COURTESY_S and away_s > self._settings.lease_s / 2:
            await self._ledger.renew(self._lease_ms)
            await first_of(self._stopping, timeout_s=COURTESY_S - back_s)

    @property
    def _lease_ms(self) -> int:
        return int(self._settings.lease_s * 1000)

    async def _renew_loop(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_s / 3)
            await self._ledger.renew(self._lease_ms)

    # -- signs and hints ---------------------------------------------------------------------------------------

    async def _beat_loop(self) -> None:
        said = time.monotonic()
        while not self._ledger.model_name:  # not before the first model is loaded
            await self._link.run(note_loading(self._keys, self.id, self._settings.model))
            await asyncio.sleep(BEAT_S)
        while True:
            await asyncio.sleep(BEAT_S)
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
            "engine": dict(self._figures.now),
            "lately": self._figures.lately(),
        }
        answer = await self._link.run(calls.heartbeat(self._keys, self.id, info))
        if answer == "unknown" and self._model is not None:
            log.warning("queue %s has forgotten this worker: registering again", self._keys.queue)
            await self._register(self._model)

    async def _listen(self) -> None:
        """Hear wake-ups and cancels. What was missed is made good by a look and a renewal once it hears again."""
        async with aclosing(self._link.hints()) as hints:
            async for hint in hints:
                await self._heed(hint)

    async def _heed(self, hint: str) -> None:
        if hint == "wake":
            self._ledger.room_made.set()
        elif hint == SUBSCRIBED:
            self._ledger.room_made.set()
            await self._ledger.renew(self._lease_ms)
        elif hint.startswith("cancel:"):
            self._ledger.cancel(hint.removeprefix("cancel:"))
