"""Follow a job: whole text, in order, once, however late or slow the watcher.

    subscribe ---- read the log ---- follow the channel ---- terminal event
                        ^                     |
                        +-- on a gap, a resubscription, or silence

The channel is fast and may lose; the log is whole. Events carry `seq`, so what was seen is dropped and what is
missing is noticed. redis-py resubscribes a cut-off subscriber without saying so (measured: 195 of 12,721 messages
arrived), hence every confirmation of a subscription is a reason to read the log again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any

from broker import calls
from broker.calls import Look
from broker.channel import AsyncChannel, Channel
from broker.queue import AsyncQueue, Queue
from protocol import (
    TERMINAL_STATES,
    JobNotFound,
    Result,
    TerminalEvent,
    TerminalType,
    TokenEvent,
    decode_event,
)

SILENCE_S = 2.0
"""After this long without a message the log is read again: a lost end is noticed this late."""

AnyEvent = TokenEvent | TerminalEvent
_TERMINAL_OF_STATE: dict[str, TerminalType] = {
    "succeeded": "done",
    "failed": "error",
    "cancelled": "cancelled",
    "expired": "expired",
    "dead": "dead",
}


@dataclass(slots=True)
class _Seen:
    characters: int = 0
    tokens: int = 0
    finished: bool = False


class Replay:
    """What a watcher has seen of a job; it owns the position in the event sequence."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.seen = 0
        self.ended = False
        self._choices: dict[int, _Seen] = {}

    def hear(self, message: dict[str, Any] | None) -> list[AnyEvent] | None:
        """The event that a message of the channel brings, nothing if it was seen. None: the log must be read, after
        silence, a subscription made (again), or a gap.
        """
        if message is None or message["type"] != "message":
            return None
        event = decode_event(message["data"])
        if event.seq > self.seen + 1:
            return None
        return [self._take(event)] if event.seq == self.seen + 1 else []

    def catch_up(self, log: Sequence[bytes]) -> list[AnyEvent]:
        """The events of the log from the first unseen one on; `log` starts at `seen`."""
        events = (decode_event(raw) for raw in log)
        return [self._take(event) for event in events if event.seq == self.seen + 1]

    def from_result(self, result: Result) -> list[AnyEvent]:
        """The rest of a job whose log is gone: each choice's unseen text, then the end."""
        events: list[AnyEvent] = []
        for choice in result.choices:
            seen = self._choices.get(choice.index, _Seen())
            if seen.finished:
                continue
            token = TokenEvent(
                id=self.job_id,
                seq=self.seen + 1,
                attempt=result.attempt,
                choice=choice.index,
                text=choice.text[seen.characters :],
                token_ids=choice.token_ids[seen.tokens :],
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=None if choice.logprobs is None else choice.logprobs[seen.tokens :],
                prompt_logprobs=None if seen.tokens else choice.prompt_logprobs,
            )
            events.append(self._take(token))
        error = result.error
        end = TerminalEvent(
            type=_TERMINAL_OF_STATE[result.state],
            id=self.job_id,
            seq=self.seen + 1,
            attempt=result.attempt,
            code=error.code if error else None,
            message=error.message if error else None,
        )
        events.append(self._take(end))
        return events

    def end_without_log(self, look: Look) -> list[AnyEvent]:
        """What is left to say after the log gave no end.

        Raises:
            JobNotFound: there is no such job (any more), or nothing is left of how it ended.
        """
        if look.result is not None:
            return self.from_result(look.result)
        if look.state is None or look.state in TERMINAL_STATES:
            raise JobNotFound.of(self.job_id)
        return []

    def _take(self, event: AnyEvent) -> AnyEvent:
        self.seen = event.seq
        if isinstance(event, TokenEvent):
            seen = self._choices.setdefault(event.choice, _Seen())
            seen.characters += len(event.text)
            seen.tokens += len(event.token_ids)
            seen.finished = event.finish_reason is not None
        else:
            self.ended = True
        return event


def follow(queue: Queue, job_id: str, silent: Callable[[], None] | None = None) -> Iterator[AnyEvent]:
    """A job's events from the first to the terminal one, as they come.

    Args:
        queue: the job's.
        job_id: its id.
        silent: called whenever nothing has come for `SILENCE_S`.

    Raises:
        JobNotFound: no such job, or its result has expired.
        redis.RedisError: the server is gone for longer than redis-py retries.
    """
    replay = Replay(job_id)
    with closing(Channel(queue.client, queue.keys.tokens(job_id))) as channel:
        channel.subscribe()
        while not replay.ended:
            message = channel.get(SILENCE_S)
            if message is None and silent is not None:
                silent()
            heard = replay.hear(message)
            yield from _repair(queue, replay) if heard is None else heard


def _repair(queue: Queue, replay: Replay) -> list[AnyEvent]:
    # The state is read before the log: a job that ended by then has its whole log written.
    look = queue.run(calls.look(queue.keys, replay.job_id))
    log: Any = queue.client.lrange(queue.keys.log(replay.job_id), replay.seen, -1)
    events = replay.catch_up(log)
    return events if replay.ended else events + replay.end_without_log(look)


async def follow_async(queue: AsyncQueue, job_id: str) -> AsyncGenerator[AnyEvent, None]:
    """`follow`, for asyncio."""
    replay = Replay(job_id)
    async with aclosing(AsyncChannel(queue.client, queue.keys.tokens(job_id))) as channel:
        await channel.subscribe()
        while not replay.ended:
            heard = replay.hear(await channel.get(SILENCE_S))
            for event in await _repair_async(queue, replay) if heard is None else heard:
                yield event


async def _repair_async(queue: AsyncQueue, replay: Replay) -> list[AnyEvent]:
    look = await queue.run(calls.look(queue.keys, replay.job_id))
    reading: Any = queue.client.lrange(queue.keys.log(replay.job_id), replay.seen, -1)
    events = replay.catch_up(await reading)
    return events if replay.ended else events + replay.end_without_log(look)
