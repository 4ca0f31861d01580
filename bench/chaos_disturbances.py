"""What is done to a running system, and when: a deck of every kind, shuffled by the seed, again and again.

    deck 1   hang a model process, kill the server, cut watchers, ...     one every `gap_s` seconds, a few at a time
    deck 2   stop a worker, lose replies to workers, ...

Turn n of a seed is always the same kind with the same numbers; which worker it meets depends on who is there.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from bench.chaos_processes import Fleet, Server, WorkerProcess
from bench.chaos_proxy import Proxy
from bench.chaos_referee import Referee

log = logging.getLogger("chaos")

LOOK_AGAIN_S = 0.05
AT_ONCE = 3
"""Disturbances that may overlap."""
BUSY_WITHIN_S = 5.0
"""How long a worker that holds jobs is waited for, before one that holds none is taken."""
LEAVES_WITHIN_S = 40.0
"""How long a worker may take to end after SIGTERM, its grace and a server that is away included."""
REPLIES_AT_ONCE = 4
REPLY_PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class Field:
    """What can be disturbed, and the times by which it is known when that hurts."""

    server: Server
    fleet: Fleet
    to_workers: Proxy
    to_clients: Proxy
    referee: Referee
    lease_s: float
    step_timeout_s: float


@dataclass(frozen=True, slots=True)
class Happening:
    """One disturbance that took place."""

    kind: str
    target: str
    at: float
    """Seconds since the run began."""
    seconds: float


Act = Callable[[Field, random.Random], Awaitable[str | None]]
"""Does it, and says to whom; None where there was nobody to do it to."""


class Schedule:
    """Disturbs a field until it is cancelled; it owns the record of what took place."""

    def __init__(
        self, field: Field, seed: int, gap_s: float, decks: int | None, kinds: Sequence[str]
    ) -> None:
        self.happened: list[Happening] = []
        self.every_kind_done = asyncio.Event()
        self._field = field
        self._seed = seed
        self._gap_s = gap_s
        self._decks = decks
        self._kinds = kinds
        self._decks_dealt = 0
        self._deck: deque[str] = deque()
        self._slots = asyncio.Semaphore(AT_ONCE)

    @property
    def counts(self) -> dict[str, int]:
        """How often each kind took place."""
        counted = Counter(happening.kind for happening in self.happened)
        return {kind: counted[kind] for kind in self._kinds}

    async def run(self) -> None:
        """Go through so many decks, or for ever. Cancelled, it waits for the end of what it has begun."""
        tasks: set[asyncio.Task[None]] = set()
        turns = count()
        try:
            while self._deal():
                await asyncio.sleep(self._gap_s)
                await self._slots.acquire()
                if not self._deck:  # a kind of the last deck is under way, and may have to come again
                    self._slots.release()
                    continue
                task = asyncio.create_task(self._disturb(next(turns), self._deck.popleft()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            await asyncio.gather(*tasks)

    def _deal(self) -> bool:
        """A new deck where there is none; False when it is over."""
        if not self._deck and self._decks_dealt != self._decks:
            deck = list(self._kinds)
            random.Random(f"deck {self._seed} {self._decks_dealt}").shuffle(deck)
            self._deck += deck
            self._decks_dealt += 1
        return bool(self._deck) or not self.every_kind_done.is_set()

    async def _disturb(self, turn: int, kind: str) -> None:
        began = self._field.referee.now
        try:
            target = await ACTS[kind](self._field, random.Random(f"turn {self._seed} {turn}"))
        finally:
            self._slots.release()
        if target is None:
            self._deck.append(kind)
            return
        happening = Happening(kind, target, began, self._field.referee.now - began)
        self.happened.append(happening)
        log.info("%6.1f s: %s: %s, %.1f s", happening.at, kind, target, happening.seconds)
        if all(self.counts.values()):
            self.every_kind_done.set()


@asynccontextmanager
async def _one_worker(field: Field, rng: random.Random) -> AsyncGenerator[WorkerProcess | None]:
    """A worker that is ready and that nothing else is being done to, for the time of the block; None without any."""
    free = await _busy(field) or _free(field)
    if not free:
        yield None
        return
    worker = rng.choice(free)
    worker.is_disturbed = True
    try:
        yield worker
    finally:
        worker.is_disturbed = False


def _free(field: Field) -> list[WorkerProcess]:
    return [worker for worker in field.fleet.workers if not worker.is_disturbed and worker.is_ready]


async def _busy(field: Field) -> list[WorkerProcess]:
    """Those of the free that hold jobs, as soon as there are any: what is done to an idle worker shows little.

    Not asked for while something is done to the server: that both are in trouble at a time is wanted.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + BUSY_WITHIN_S
    while loop.time() < deadline and not field.server.disturbed.locked():
        holders = [holder for holder, _ in await field.referee.held()]
        busy = [worker for worker in _free(field) if any(worker.identity in holder for holder in holders)]
        if busy:
            return busy
        await asyncio.sleep(LOOK_AGAIN_S)
    return []


# -- workers ---------------------------------------------------------------------------------------------------


async def kill_worker(field: Field, rng: random.Random) -> str | None:
    """SIGKILL to the parent; the model process must notice by itself."""
    async with _one_worker(field, rng) as worker:
        if worker is None:
            return None
        worker.asked_to_end = -signal.SIGKILL
        worker.send(signal.SIGKILL)
        return worker.name


async def kill_model(field: Field, rng: random.Random) -> str | None:
    """SIGKILL to the model process, unless that would convict a job that has already had bad luck twice.

    The parent stands still meanwhile, so that what it holds is what is looked at.
    """
    async with _one_worker(field, rng) as worker:
        if worker is None:
            return None
        worker.send(signal.SIGSTOP)
        try:
            if await field.referee.holds_only_suspects(worker.identity):
                return None
            return worker.name if worker.send_model(signal.SIGKILL) else None
        finally:
            worker.send(signal.SIGCONT)


async def hang_model(field: Field, rng: random.Random) -> str | None:
    """SIGSTOP to the model process until its parent has lost patience. Let go where a suspect turns up."""
    async with _one_worker(field, rng) as worker:
        if worker is None:
            return None
        pid = worker.model_pid
        if pid is None or await field.referee.holds_only_suspects(worker.identity):
            return None
        worker.send_model(signal.SIGSTOP)
        try:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + 1.5 * field.step_timeout_s + 1.0
            while worker.model_pid == pid and loop.time() < deadline:
                if await field.referee.holds_only_suspects(worker.identity):
                    return None
                await asyncio.sleep(LOOK_AGAIN_S)
            return worker.name if worker.model_pid != pid else None
        finally:
            if worker.model_pid == pid:
                worker.send_model(signal.SIGCONT)


async def stop_model(field: Field, rng: random.Random) -> str | None:
    """SIGSTOP and SIGCONT to the model process: a slow step."""
    async with _one_worker(field, rng) as worker:
        if worker is None or not worker.send_model(signal.SIGSTOP):
            return None
        await asyncio.sleep(rng.uniform(0.1, 0.4) * field.step_timeout_s)
        worker.send_model(signal.SIGCONT)
        return worker.name


async def stop_worker(field: Field, rng: random.Random) -> str | None:
    """SIGSTOP and SIGCONT to the parent, for less than a lease."""
    return await _stop_worker(field, rng, rng.uniform(0.1, 0.5) * field.lease_s)


async def make_zombie(field: Field, rng: random.Random) -> str | None:
    """SIGSTOP and SIGCONT to the parent, for longer than a lease: it wakes up with jobs that others have."""
    return await _stop_worker(field, rng, rng.uniform(1.3, 1.8) * field.lease_s + 0.5)


async def _stop_worker(field: Field, rng: random.Random, seconds: float) -> str | None:
    async with _one_worker(field, rng) as worker:
        if worker is None:
            return None
        worker.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            worker.send(signal.SIGCONT)
        return worker.name


async def end_worker(field: Field, rng: random.Random) -> str | None:
    """SIGTERM: it drains, and ends with exit code 0."""
    async with _one_worker(field, rng) as worker:
        return None if worker is None else await _end(worker, again_after_s=None)


async def hurry_worker(field: Field, rng: random.Random) -> str | None:
    """SIGTERM twice: it hands everything back at once, and ends with exit code 0."""
    async with _one_worker(field, rng) as worker:
        return None if worker is None else await _end(worker, again_after_s=rng.uniform(0.05, 0.3))


async def _end(worker: WorkerProcess, again_after_s: float | None) -> str:
    process, loop = worker.process, asyncio.get_running_loop()
    worker.asked_to_end = 0
    process.send_signal(signal.SIGTERM)
    if again_after_s is not None:
        await asyncio.sleep(again_after_s)
        process.send_signal(signal.SIGTERM)
    deadline = loop.time() + LEAVES_WITHIN_S
    while process.poll() is None:
        if loop.time() > deadline:
            process.kill()  # its exit code will say that it had to be
        await asyncio.sleep(LOOK_AGAIN_S)
    return worker.name


# -- the server, and the way to it -------------------------------------------------------------------------------


async def kill_server(field: Field, rng: random.Random) -> str | None:
    """SIGKILL, and started again from its append-only file."""
    async with field.server.disturbed:
        field.server.kill()
        await asyncio.sleep(rng.uniform(0.1, 2.0))
        await field.server.start()
    return "server"


async def pause_server(field: Field, rng: random.Random) -> str | None:
    """SIGSTOP and SIGCONT: connected, and silent."""
    async with field.server.disturbed:
        field.server.pause()
        try:
            await asyncio.sleep(rng.uniform(0.2, 0.7) * field.lease_s)
        finally:
            field.server.resume()
    return "server"


async def flush_scripts(field: Field, _rng: random.Random) -> str | None:
    """The server forgets every script."""
    await field.referee.ask(lambda: field.referee.client.script_flush())
    return "server"


async def kill_subscribers(field: Field, _rng: random.Random) -> str | None:
    """The server drops every subscriber, as it does with those that are too slow."""
    killed = await field.referee.ask(lambda: field.referee.client.client_kill_filter(_type="pubsub"))
    return f"{killed} subscribers" if killed else None


async def cut_workers(field: Field, _rng: random.Random) -> str | None:
    """Every connection of every worker ends."""
    return _connections(field.to_workers.cut())


async def cut_clients(field: Field, _rng: random.Random) -> str | None:
    """Every connection of every submitter and watcher ends."""
    return _connections(field.to_clients.cut())


async def lose_workers_replies(field: Field, rng: random.Random) -> str | None:
    """Workers' calls run, and their replies do not arrive."""
    return _replies(await field.to_workers.lose_replies(rng, REPLIES_AT_ONCE, REPLY_PATIENCE_S))


async def lose_clients_replies(field: Field, rng: random.Random) -> str | None:
    """Submits', cancels' and looks' replies do not arrive."""
    return _replies(await field.to_clients.lose_replies(rng, REPLIES_AT_ONCE, REPLY_PATIENCE_S))


async def stall_workers(field: Field, rng: random.Random) -> str | None:
    """Nothing passes between workers and server for a while, and nothing is lost."""
    return "workers" if await field.to_workers.stall(rng.uniform(0.2, 0.7) * field.lease_s) else None


async def stall_clients(field: Field, rng: random.Random) -> str | None:
    """Nothing passes between clients and server for a while, and nothing is lost."""
    return "clients" if await field.to_clients.stall(rng.uniform(0.2, 0.7) * field.lease_s) else None


def _connections(number: int) -> str | None:
    return f"{number} connections" if number else None


def _replies(number: int) -> str | None:
    return f"{number} replies" if number else None


ACTS: dict[str, Act] = {
    "SIGKILL to a worker": kill_worker,
    "SIGKILL to a model process": kill_model,
    "SIGSTOP to a model process, until it is replaced": hang_model,
    "SIGSTOP to a model process, shortly": stop_model,
    "SIGSTOP to a worker, for less than a lease": stop_worker,
    "SIGSTOP to a worker, for longer than a lease": make_zombie,
    "SIGTERM to a worker": end_worker,
    "SIGTERM to a worker, twice": hurry_worker,
    "SIGKILL to the server": kill_server,
    "SIGSTOP to the server": pause_server,
    "SCRIPT FLUSH": flush_scripts,
    "subscribers cut off by the server": kill_subscribers,
    "workers' connections dropped": cut_workers,
    "clients' connections dropped": cut_clients,
    "replies to workers lost": lose_workers_replies,
    "replies to clients lost": lose_clients_replies,
    "workers' connections stalled": stall_workers,
    "clients' connections stalled": stall_clients,
}
