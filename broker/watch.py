"""Follow a job: whole text, in order, once, however late or slow the watcher.

    subscribe ---- read the log ---- follow the channel ---- terminal event
                        ^                     |
                        +-- on a gap, a resubscription, or silence

The channel is fast and may lose; the log is whole. Events carry `seq`, so what was seen is dropped and what is
missing is noticed. redis-py resubscribes a cut-off subscriber without saying so (measured: 195 of 12,721 messages
arrived), hence every confirmation of a subscription is a reason to read the log again.

What was seen must still be what the log holds: a job that died and was requeued meanwhile has another log, of another
life. Its watcher hears that the life it followed ended, as one does that was there.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from broker import calls
from broker.calls import Look
from broker.channel import AsyncChannel, Channel
from broker.queue import AsyncQueue, Queue
from protocol import (
    TERMINAL_STATES,
    JobNotFound,
    MillstreamError,
    Result,
    TerminalEvent,
    TerminalType,
    TokenEvent,
    decode_event,
    describe_validation,
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
        self._last: TokenEvent | None = None
        """The last event that was seen."""
        self._spoilt = ""
        """What is wrong with the log from there on."""
        self._is_torn = False
        """What was seen is no beginning of what is there now."""

    @property
    def log_from(self) -> int:
        """From which index on the log is read: the last event that was seen is compared."""
        return max(0, self.seen - 1)

    def hear(self, message: dict[str, Any] | None) -> list[AnyEvent] | None:
        """The event that a message of the channel brings, nothing if it was seen. None: the log must be read, after
        silence, a subscription made (again), a gap, what is no event, or where another attempt goes on.
        """
        if message is None or message["type"] != "message":
            return None
        try:
            event = decode_event(message["data"])
        except ValueError:
            return None
        if event.seq > self.seen + 1 or (self._last is not None and event.attempt != self._last.attempt):
            return None
        return [self._take(event)] if event.seq == self.seen + 1 else []

    def is_another_life(self, log: Sequence[bytes]) -> bool:
        """Whether the log, read from `log_from`, is not the one whose last event was seen, as far as it tells."""
        return self._last is not None and (not log or _read(log[0]) != self._last)

    def begin_anew(self, died_at: Sequence[int]) -> list[AnyEvent]:
        """What there is to say where it is not.

        Args:
            died_at: at which attempts earlier lives of the job ended, as dead.

        Returns: the end of the life that was watched, if it has died; else nothing.
        """
        if self._last is None or not any(attempt >= self._last.attempt for attempt in died_at):
            return []
        message = "it died and was requeued meanwhile: what it said last is gone, watch its next life anew"
        end = TerminalEvent(
            type="dead",
            id=self.job_id,
            seq=self.seen + 1,
            attempt=self._last.attempt,
            code=None,
            message=message,
        )
        return [self._take(end)]

    def catch_up(self, log: Sequence[bytes]) -> list[AnyEvent]:
        """The events of the log from the first unseen one on, up to one that cannot be read; `log` starts at
        `log_from`.
        """
        self._spoilt, self._is_torn = "", False
        events: list[AnyEvent] = []
        for number, raw in enumerate(log, self.log_from + 1):
            event = _read(raw)
            if number <= self.seen:
                self._is_torn = isinstance(event, TokenEvent) and not _say_the_same(event, self._last)
                if self._is_torn:
                    self._spoilt = f"event {number} is not what it was, as where a server lost its last data"
                    break
            elif isinstance(event, str):
                self._spoilt = f"event {number} is none: {event}"
                break
            elif event.seq != number:
                self._spoilt = f"event {number} says that it is event {event.seq}"
                break
            else:
                events.append(self._take(event))
        return events

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

    def end_without_log(self, look: Look, found: Sequence[AnyEvent]) -> list[AnyEvent]:
        """What is left to say after the log gave no end, but what was found in it. Its fault is told behind that.

        Raises:
            JobNotFound: there is no such job (any more), or nothing is left of how it ended.
            MillstreamError: its log is spoilt, and no result can go on where it ends.
        """
        if look.result is not None and not self._is_torn:
            return self.from_result(look.result)
        if look.state is None or (
            look.state in TERMINAL_STATES and not self._spoilt
        ):  # nothing is left of it
            raise JobNotFound.of(self.job_id)
        if self._spoilt and not found:
            raise MillstreamError(f"job {self.job_id}: its log is spoilt: {self._spoilt}")
        return []

    def _take(self, event: AnyEvent) -> AnyEvent:
        self.seen = event.seq
        if isinstance(event, TokenEvent):
            seen = self._choices.setdefault(event.choice, _Seen())
            seen.characters += len(event.text)
            seen.tokens += len(event.token_ids)
            seen.finished = event.finish_reason is not None
            self._last = event
        else:
            self.ended = True
        return event


def _read(raw: bytes) -> AnyEvent | str:
    """An event, or in a line why it is none."""
    try:
        return decode_event(raw)
    except ValidationError as error:
        return describe_validation(error)


def _say_the_same(event: TokenEvent, seen: TokenEvent | None) -> bool:
    """Whether what stands in an event's place goes for it. A server that lost data has it from another attempt."""
    return seen is not None and (event.seq, event.choice, event.text, event.token_ids) == (
        *(seen.seq, seen.choice),
        *(seen.text, seen.token_ids),
    )


def _died_at(history: bytes | None) -> list[int]:
    """At which attempts earlier lives ended, of a job's field `history`."""
    try:
        return [int(json.loads(line)["attempt"]) for line in (history or b"").splitlines()]
    except (ValueError, KeyError, TypeError):
        return []  # somebody spoilt it


def follow(queue: Queue, job_id: str, silent: Callable[[], None] | None = None) -> Iterator[AnyEvent]:
    """A job's events from the first to the terminal one, as they come.

    Args:
        queue: the job's.
        job_id: its id.
        silent: called whenever nothing has come for `SILENCE_S`.

    Raises:
        JobNotFound: no such job, or its result has expired.
        MillstreamError: its log is spoilt, and no result can go on where it ends.
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
    client: Any = queue.client
    log = client.lrange(queue.keys.log(replay.job_id), replay.log_from, -1)
    if replay.is_another_life(log):
        end = replay.begin_anew(_died_at(client.hget(queue.keys.job(replay.job_id), "history")))
        if end:
            return end
    events = replay.catch_up(log)
    return events if replay.ended else events + replay.end_without_log(look, events)


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
    client: Any = queue.client
    log = await client.lrange(queue.keys.log(replay.job_id), replay.log_from, -1)
    if replay.is_another_life(log):
        end = replay.begin_anew(_died_at(await client.hget(queue.keys.job(replay.job_id), "history")))
        if end:
            return end
    events = replay.catch_up(log)
    return events if replay.ended else events + replay.end_without_log(look, events)
