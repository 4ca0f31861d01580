"""Speaking to a Redis that may be away: calls are repeated until it is back, with one log line a change of state.

Repeating is safe, since every script answers a repetition as it answered the first time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import redis.exceptions as errors

from broker.faults import passes
from broker.queue import AsyncQueue
from broker.script import Call

log = logging.getLogger("millstream.worker")

T = TypeVar("T")

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 2.0


class Link:
    """A queue that is waited for."""

    def __init__(self, queue: AsyncQueue) -> None:
        self.queue = queue
        self.keys = queue.keys
        self._down_since: float | None = None

    async def run(self, call: Call[T]) -> T:
        """Run one call, however long the server is away.

        Raises:
            redis.RedisError: the server refuses the call itself.
        """
        return await self.insist(lambda: self.queue.run(call))

    async def run_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Run calls in one round trip, as `run`."""
        return await self.insist(lambda: self.queue.run_all(calls))

    async def insist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat until the server has answered."""
        wait_s = FIRST_WAIT_S
        loop = asyncio.get_running_loop()
        while True:
            try:
                answer = await attempt()
            except (errors.RedisError, OSError) as error:
                if not passes(error):
                    raise
                if self._down_since is None:
                    self._down_since = loop.time()
                    log.warning("redis is away, waiting for it: %s", str(error).splitlines()[0])
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                continue
            if self._down_since is not None:
                log.warning("redis is back after %.1f s", loop.time() - self._down_since)
                self._down_since = None
            return answer
