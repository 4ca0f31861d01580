"""Retries that go on for a time rather than for a number of tries.

A failover or a restart takes seconds, and redis-py's few retries are over in half of one. A call whose reply was
lost is repeated too: every script answers a repetition as it answered the first time.

What a server does not answer in time is not asked again within the few: a silent one was told of after four timeouts.
redis-py connects, and asks whether a server is well, with tries of their own inside of those to call. The inner ones
are left out, else what one of them waits is waited by each of the outer ones.

BUSY (a script runs long) is to redis-py an error like any other, and in a pipeline a reply among others. It passes,
so it is ridden out as LOADING is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import redis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import AbstractBackoff
from redis.retry import Retry

from broker.faults import ServerBusy, is_busy, is_refusal

T = TypeVar("T")

PAUSE_S = 0.2
_IS_WITHIN: ContextVar[bool] = ContextVar("is_within", default=False)
"""Whether this thread, or task, is within a call that is tried again."""


def _unless_busy(reply: T) -> T:
    """A reply, or a pipeline's replies, none of which says BUSY: all of them are asked for again."""
    for one in reply if isinstance(reply, list) else ():
        if is_busy(one):
            raise one
    return reply


def _translated(error: redis.ResponseError) -> redis.RedisError:
    """What a server says that passes by waiting, as redis-py has it tried again."""
    if not is_busy(error):
        return error
    busy = ServerBusy(str(error))
    busy.__cause__ = error
    return busy


class Patient(Retry):
    """redis-py's retries, again and again until `patience_s` seconds are over."""

    def __init__(self, patience_s: float, backoff: AbstractBackoff, retries: int) -> None:
        super().__init__(backoff, retries, (redis.ConnectionError,))
        self._patience_s = patience_s

    def call_with_retry(self, do: Callable[[], T], fail: Callable[..., Any], *args: Any, **options: Any) -> T:
        """As `Retry.call_with_retry`."""
        if _IS_WITHIN.get():
            return do()

        def do_within() -> T:
            token = _IS_WITHIN.set(True)
            try:
                return _unless_busy(do())
            except redis.ResponseError as error:
                raise _translated(error)  # noqa: B904 - it has its cause
            finally:
                _IS_WITHIN.reset(token)

        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return super().call_with_retry(do_within, fail, *args, **options)
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if time.monotonic() + PAUSE_S > deadline or is_refusal(error):
                    raise
            time.sleep(PAUSE_S)


class PatientAsync(AsyncRetry):
    """As `Patient`, for asyncio."""

    def __init__(self, patience_s: float, backoff: AbstractBackoff, retries: int) -> None:
        super().__init__(backoff, retries, (redis.ConnectionError,))
        self._patience_s = patience_s

    async def call_with_retry(
        self, do: Callable[[], Awaitable[T]], fail: Callable[..., Any], *args: Any, **options: Any
    ) -> T:
        """As `Retry.call_with_retry`."""
        if _IS_WITHIN.get():
            return await do()

        async def do_within() -> T:
            token = _IS_WITHIN.set(True)
            try:
                return _unless_busy(await do())
            except redis.ResponseError as error:
                raise _translated(error)  # noqa: B904 - it has its cause
            finally:
                _IS_WITHIN.reset(token)

        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return await super().call_with_retry(do_within, fail, *args, **options)
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if time.monotonic() + PAUSE_S > deadline or is_refusal(error):
                    raise
            await asyncio.sleep(PAUSE_S)
