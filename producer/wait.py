"""Wait for a job's result without asking again and again: its channel says when to look."""

from __future__ import annotations

import time
from contextlib import aclosing, closing
from typing import Any

from broker import calls
from broker.calls import Look
from broker.channel import AsyncChannel, Channel
from broker.queue import AsyncQueue, Queue
from broker.watch import SILENCE_S
from protocol import TERMINAL_STATES, JobNotFound, Result, is_token


def wait_for_result(queue: Queue, job_id: str, timeout_s: float | None) -> Result:
    """The result, once there is one. `timeout_s` 0 looks once; None waits for ever.

    Raises:
        JobNotFound: no such job, or its result has expired; at once.
        TimeoutError: it had not ended by then.
    """
    patience = _Patience(job_id, timeout_s)
    with closing(Channel(queue.client, queue.keys.tokens(job_id))) as channel:
        channel.subscribe()
        while True:
            look = queue.run(calls.look(queue.keys, job_id))
            if (result := _ended(job_id, look)) is not None:
                return result
            message: Any = None
            while not _says_look(message):
                message = channel.get(patience.left_s(look))
                if message is None:
                    break


async def wait_for_result_async(queue: AsyncQueue, job_id: str, timeout_s: float | None) -> Result:
    """`wait_for_result`, for asyncio."""
    patience = _Patience(job_id, timeout_s)
    async with aclosing(AsyncChannel(queue.client, queue.keys.tokens(job_id))) as channel:
        await channel.subscribe()
        while True:
            look = await queue.run(calls.look(queue.keys, job_id))
            if (result := _ended(job_id, look)) is not None:
                return result
            message: Any = None
            while not _says_look(message):
                message = await channel.get(patience.left_s(look))
                if message is None:
                    break


class _Patience:
    def __init__(self, job_id: str, timeout_s: float | None) -> None:
        self._job_id = job_id
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self, look: Look) -> float:
        """How long to listen before the next look: the end may have been announced to a connection that broke."""
        if self._deadline is None:
            return SILENCE_S
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            after = f" after {self._timeout_s:g} s" if self._timeout_s else ""
            raise TimeoutError(f"job {self._job_id}: not ended{after}, it was {look.state}")
        return min(left_s, SILENCE_S)


def _ended(job_id: str, look: Look) -> Result | None:
    if look.result is None and (look.state is None or look.state in TERMINAL_STATES):
        raise JobNotFound.of(job_id)
    return look.result


def _says_look(message: Any) -> bool:
    """Whether a message is a reason to look: the terminal event, or a subscription made (again)."""
    if message is None:
        return False
    return message["type"] != "message" or not is_token(message["data"])
