"""Looks at the server past all proxies: who has ended, what is stored of each job, and what stays behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

import redis.exceptions

from bench.chaos_books import Account, Fault, Stream
from bench.chaos_jobs import RUN
from broker import calls
from broker.calls import Look
from broker.connection import connect_async
from broker.keys import PERMANENT, Keys
from broker.queue import AsyncQueue
from broker.script import Call
from protocol import Result, decode_event
from worker.quarantine import ALONE_AFTER

T = TypeVar("T")

LOOK_AGAIN_S = 0.1
AT_ONCE = 200
NO_EXPIRY = -1
"""What TTL answers of a key that stays."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the server holds of a job."""

    look: Look
    log: Stream
    not_before: float | None
    deadline: float | None
    """Seconds since the epoch, by the server's clock."""


class Referee:
    """Nothing is done to its connection but what is done to the server itself; then it asks again."""

    def __init__(self, url: str, keys: Keys) -> None:
        self.keys = keys
        self._queue = AsyncQueue(connect_async(url), keys)
        self.client: Any = self._queue.client
        self.ends: dict[str, list[str]] = {}
        """States in which each job was announced as ended, as they are announced."""
        self.entries: dict[str, str] = {}
        """The announcement of each, as `forget` wants it."""
        self.ended_at: dict[str, float] = {}
        """When each was first heard to have ended."""
        self.news = asyncio.Event()
        """Set whenever there is an end more."""
        self._began = asyncio.get_running_loop().time()

    @property
    def now(self) -> float:
        """Seconds since the run began: everybody's clock."""
        return asyncio.get_running_loop().time() - self._began

    async def ask(self, question: Callable[[], Awaitable[T]]) -> T:
        """Ask until the server has answered."""
        while True:
            try:
                return await question()
            except (redis.exceptions.RedisError, OSError):
                await asyncio.sleep(LOOK_AGAIN_S)

    async def run(self, call: Call[T]) -> T:
        """Run one call of `broker.calls`, however long the server is away."""
        return await self.ask(lambda: self._queue.run(call))

    async def read_ends(self) -> None:
        """Read the run's announcements, for ever."""
        after = "-"
        while True:
            entries: Any = await self.ask(partial(self.client.xrange, self.keys.done(RUN), after))
            for entry, results in entries:
                after = f"({entry.decode()}"
                for job_id, raw in results.items():
                    self._note_end(job_id.decode(), Result.decode(raw).state, entry.decode())
                self.news.set()
            await asyncio.sleep(LOOK_AGAIN_S)

    def _note_end(self, job_id: str, state: str, entry: str) -> None:
        self.ends.setdefault(job_id, []).append(state)
        self.ended_at.setdefault(job_id, self.now)
        self.entries[job_id] = entry

    async def held(self) -> list[tuple[str, int]]:
        """Worker and crashes of each job that is leased."""
        held: list[tuple[str, int]] = []
        for job_id in await self.ask(lambda: self.client.zrange(self.keys.leases, 0, -1)):
            key = self.keys.job(job_id.decode())
            worker, crashes = await self.ask(partial(self.client.hmget, key, "worker", "crashes"))
            held.append(((worker or b"").decode(), int(crashes or 0)))
        return held

    async def holds_only_suspects(self, worker: str) -> bool:
        """Whether a worker (the middle of its name) has jobs that each run alone, and no others.

        Then a crash of its model process would convict the one that runs; beside any other job none of them does.
        """
        crashes = [crashes for holder, crashes in await self.held() if worker in holder]
        return bool(crashes) and min(crashes) >= ALONE_AFTER

    async def found(self, job_id: str) -> Found:
        """State, result and log of a job."""
        look = await self.run(calls.look(self.keys, job_id))
        raw: list[bytes] = await self.ask(lambda: self.client.lrange(self.keys.log(job_id), 0, -1))
        log = Stream(job_id, "log", [decode_event(event) for event in raw], is_whole=look.result is not None)
        kept = await self.ask(lambda: self.client.hmget(self.keys.job(job_id), "not_before", "deadline"))
        return Found(look, log, *(None if ms is None else int(ms) / 1000 for ms in kept))

    async def dead_letter_faults(self, accounts: Iterable[Account]) -> list[Fault]:
        """Each job that ended dead has one letter, and no other job has one."""
        entries: Any = await self.ask(lambda: self.client.xrange(self.keys.dead))
        letters = Counter(fields[b"id"].decode() for _, fields in entries)
        due = Counter(account.id for account in accounts if account.state == "dead")
        lost = [Fault("lost", job_id, "it is dead, and has no dead letter") for job_id in due - letters]
        return lost + [Fault("doubled", job_id, "a dead letter too many") for job_id in letters - due]

    async def lasting(self) -> list[Fault]:
        """Keys of ended jobs that would stay for ever if nobody collected them."""
        kinds = (self.keys.job, self.keys.log, self.keys.result)
        names = [(job_id, key(job_id)) for job_id in self.entries for key in kinds]
        found = []
        for start in range(0, len(names), AT_ONCE):
            part = names[start : start + AT_ONCE]
            expiries = await self.ask(partial(self._expiries, [name for _, name in part]))
            for (job_id, name), expiry in zip(part, expiries, strict=True):
                if expiry == NO_EXPIRY:
                    found.append(Fault("leaked", job_id, f"the key {name} has no expiry"))
        return found

    async def _expiries(self, names: Iterable[str]) -> list[int]:
        """What TTL answers of each key."""
        async with self.client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.ttl(name)
            expiries: list[int] = await pipe.execute()
        return expiries

    async def collect(self) -> None:
        """Delete every job that has ended, as a bulk run does, and the dead letters."""
        pairs = list(self.entries.items())
        for start in range(0, len(pairs), AT_ONCE):
            await self.run(calls.forget(self.keys, RUN, pairs[start : start + AT_ONCE]))
        await self.ask(lambda: self.client.delete(self.keys.done(RUN)))

    async def left(self) -> list[Fault]:
        """What is left of a queue whose jobs have all been collected."""
        counts = await self.ask(lambda: self.client.hmget(self.keys.meta, "entries", "bytes"))
        found = [
            Fault("leaked", "-", f"meta says {name} {int(count)}")
            for name, count in zip(("entries", "bytes"), counts, strict=True)
            if count is not None and int(count) != 0
        ]
        names = [name.decode() async for name in self.client.scan_iter(f"{self.keys.base}*", count=1000)]
        return found + leaked(self.keys, names)

    async def close(self) -> None:
        """Close the connection."""
        await self._queue.close()


def leaked(keys: Keys, names: Iterable[str]) -> list[Fault]:
    """Keys that nobody needs once every job has been collected.

    What a worker leaves that is killed expires by itself: its last lease reply, and that it loads its model.
    """
    allowed = [*PERMANENT, "lease:*", "loading"]
    found = []
    for name in sorted(names):
        rest = name.removeprefix(keys.base)
        if not any(fnmatchcase(rest, pattern) for pattern in allowed):
            _, _, job_id = rest.partition(":")
            found.append(Fault("leaked", job_id or "-", f"the key {name}"))
    return found
