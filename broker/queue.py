"""The queue on a server: runs calls, one or many, sync and asyncio.

redis-py repeats a call whose reply was lost; the scripts answer a repetition as they answered the first time. A
server that has forgotten a script (restart, failover, SCRIPT FLUSH) is given it again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.exceptions import NoScriptError

from broker.finding import is_sharded
from broker.keys import Keys
from broker.script import Arg, Call

T = TypeVar("T")


class Queue:
    """One queue, for blocking callers."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self.client = client
        self.keys = keys
        self._on_cluster = is_sharded(client)
        self._execute: Callable[..., Any] = client.execute_command

    def run(self, call: Call[T]) -> T:
        """Run one call.

        Raises:
            redis.RedisError: the server could not be reached, or refused.
        """
        try:
            reply = self._execute(*call.by_sha(self._on_cluster))
        except NoScriptError:
            reply = self._execute(*call.by_source(self._on_cluster))
        return call.read(reply)

    def run_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Run calls in one round trip, in order; replies in order.

        Raises:
            redis.RedisError: as the first call that failed; the others may have run.
        """
        if not calls:
            return []
        replies = self._pipeline([call.by_sha(self._on_cluster) for call in calls])
        if any(isinstance(reply, NoScriptError) for reply in replies):
            # All of them again, in order: a later call may have been refused for the lack of an earlier one. With
            # their sources, so that a cache emptied once more does not matter.
            replies = self._pipeline([call.by_source(self._on_cluster) for call in calls])
        return [call.read(checked(reply)) for call, reply in zip(calls, replies, strict=True)]

    def _pipeline(self, commands: Sequence[tuple[Arg, ...]]) -> list[Any]:
        with self.client.pipeline(transaction=False) as pipe:
            add: Callable[..., Any] = pipe.execute_command
            for command in commands:
                add(*command)
            replies: list[Any] = pipe.execute(raise_on_error=False)
        return replies

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


class AsyncQueue:
    """One queue, for asyncio."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self.client = client
        self.keys = keys
        self._on_cluster = is_sharded(client)
        self._execute: Callable[..., Awaitable[Any]] = client.execute_command

    async def run(self, call: Call[T]) -> T:
        """Run one call. Raises as `Queue.run`."""
        try:
            reply = await self._execute(*call.by_sha(self._on_cluster))
        except NoScriptError:
            reply = await self._execute(*call.by_source(self._on_cluster))
        return call.read(reply)

    async def run_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Run calls in one round trip, in order. Raises as `Queue.run_all`."""
        if len(calls) < 2:
            return [await self.run(call) for call in calls]  # a pipeline takes redis-py 40 us more
        replies = await self._pipeline([call.by_sha(self._on_cluster) for call in calls])
        if any(isinstance(reply, NoScriptError) for reply in replies):
            # All of them again, in order: a later call may have been refused for the lack of an earlier one. With
            # their sources, so that a cache emptied once more does not matter.
            replies = await self._pipeline([call.by_source(self._on_cluster) for call in calls])
        return [call.read(checked(reply)) for call, reply in zip(calls, replies, strict=True)]

    async def _pipeline(self, commands: Sequence[tuple[Arg, ...]]) -> list[Any]:
        async with self.client.pipeline(transaction=False) as pipe:
            add: Callable[..., Any] = pipe.execute_command
            for command in commands:
                add(*command)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        return replies

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()


def checked(reply: Any) -> Any:
    """The reply of one call of a pipeline.

    Raises:
        redis.RedisError: the reply is an error.
    """
    if isinstance(reply, Exception):
        raise reply
    return reply
