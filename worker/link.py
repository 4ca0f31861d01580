"""Speaking to a Redis that may be away: calls are repeated until it is back, with one log line a change of state.

Repeating is safe, since every script answers a repetition as it answered the first time.

    fine --- a call fails ---> away: that call waits, and each that fails beside it
      ^                          |
      '-- the last that waited has its answer

A server may refuse some calls and answer others (full memory: reads and leases go on, writes wait), so an answer to a
call that never waited says nothing about the trouble.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

import redis.exceptions as errors

from broker.channel import AsyncChannel
from broker.faults import in_words, passes
from broker.queue import AsyncQueue
from broker.script import Call

log = logging.getLogger("millstream.worker")

T = TypeVar("T")

SUBSCRIBED = "subscribed"
"""A hint of the link's own: from now on hints are heard, and some may have been missed before."""
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 2.0
LISTEN_S = 2.0
"""How long the listener waits for a hint at a time; in between redis-py looks whether the connection lives."""


class Link:
    """A queue that is waited for."""

    def __init__(self, queue: AsyncQueue) -> None:
        self.queue = queue
        self.keys = queue.keys
        self._waiting = 0
        """Calls that wait for the server."""
        self._said: set[str] = set()
        """What was said of this trouble."""
        self._since = 0.0
        self._away_s = 0.0
        self._back_at = -math.inf

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
        try:
            return await attempt()
        except (errors.RedisError, OSError) as error:
            self._note(error)
        self._waiting += 1
        try:
            answer = await self._repeat(attempt)
            if self._waiting == 1:
                self._back_at = asyncio.get_running_loop().time()
                self._away_s = self._back_at - self._since
                log.warning("redis is back after %.1f s", self._away_s)
            return answer
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._said.clear()

    def last_trouble(self) -> tuple[float, float]:
        """For how many seconds the server was last away, and for how many it has been back: 0 while calls wait."""
        now = asyncio.get_running_loop().time()
        return (now - self._since, 0.0) if self._waiting else (self._away_s, now - self._back_at)

    async def hints(self) -> AsyncGenerator[str, None]:
        """What is said on the queue's control channel, for ever; `SUBSCRIBED` after each subscription, those included
        that redis-py makes by itself: what was said while there was none is missed.
        """
        while True:
            async with aclosing(AsyncChannel(self.queue.client, self.keys.control)) as channel:
                await self.insist(lambda: self._subscribe(channel))
                yield SUBSCRIBED
                try:
                    while True:
                        message = await channel.get(LISTEN_S)
                        if message is not None:
                            yield message["data"].decode() if message["type"] == "message" else SUBSCRIBED
                except (errors.RedisError, OSError) as error:
                    if not passes(error):
                        raise

    async def _subscribe(self, channel: AsyncChannel) -> None:
        await channel.subscribe()
        await channel.get(LISTEN_S)  # a server that refuses says so in place of the confirmation

    async def _repeat(self, attempt: Callable[[], Awaitable[T]]) -> T:
        wait_s = FIRST_WAIT_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            try:
                return await attempt()
            except (errors.RedisError, OSError) as error:
                self._note(error)

    def _note(self, error: errors.RedisError | OSError) -> None:
        """Say what the trouble is, once; raise what waiting cannot mend."""
        if not passes(error):
            raise error
        if not self._said:
            self._since = asyncio.get_running_loop().time()
        trouble, said = in_words(error)
        if trouble not in self._said:
            self._said.add(trouble)
            log.warning("redis is away, waiting for it: %s (%s)", trouble, said)
