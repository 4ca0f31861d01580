"""What a worker holds, and everything it says about it to Redis.

Each job is fenced by its attempt: what is said for a lease that was lost is refused, and the job dropped. Whoever
speaks does so under `_speaking`, so that a job's events and its end never overtake each other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from broker import calls
from broker.calls import Handback, Lease
from broker.failpoints import reached
from broker.script import Call
from protocol import ErrorCode, JobError, TerminalState, TerminalType
from worker.frames import Drop, Run, Step, ToModel
from worker.held import Held
from worker.link import Link

log = logging.getLogger("millstream.worker")

ALONE_AFTER_CRASHES = 2
"""A job whose process died this often runs alone; dying once more convicts it."""


class Ledger:
    """The jobs of one worker, by the key under which the model process knows them."""

    def __init__(self, link: Link, worker: str, to_model: Callable[[ToModel], bool]) -> None:
        self.model_name = ""
        self.empty = asyncio.Event()
        self.empty.set()
        self.room_made = asyncio.Event()
        self._link = link
        self._keys = link.keys
        self._worker = worker
        self._to_model = to_model
        self._held: dict[str, Held] = {}
        self._suspects: deque[Held] = deque()
        self._alone: Held | None = None
        self._speaking = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def running(self) -> int:
        """Jobs the model process is at: it prepares them, or runs them."""
        return sum(held.sent_at is not None for held in self._held.values())

    @property
    def running_since(self) -> float | None:
        """When the oldest of them was sent; None without any."""
        return min((held.sent_at for held in self._held.values() if held.sent_at is not None), default=None)

    @property
    def sequences(self) -> int:
        """Choices that run or will: what takes the engine's slots."""
        return sum(held.open_choices for held in self._held.values())

    @property
    def quarantined(self) -> bool:
        """Whether a suspect waits or runs: nothing may run beside it."""
        return bool(self._suspects) or self._alone is not None

    # -- taking ------------------------------------------------------------------------------------------------

    async def take(self, leases: Sequence[Lease]) -> None:
        """Hold what was leased, and run it."""
        for lease in leases:
            log.debug("job %s attempt %d: leased", lease.id, lease.attempt)
            held = Held(lease, await self._read_log(lease) if lease.logged else ())
            self._held[held.key] = held
            self.empty.clear()
            if lease.crashes >= ALONE_AFTER_CRASHES:
                self._suspects.append(held)
            else:
                self._run(held)
        self._run_suspect()

    def run_again(self) -> None:
        """Run what was leased while there was no model process."""
        for held in self._held.values():
            if held not in self._suspects:
                self._run(held)

    async def _read_log(self, lease: Lease) -> list[bytes]:
        log.info("job %s attempt %d: goes on after %d logged events", lease.id, lease.attempt, lease.logged)
        client: Any = self._link.queue.client
        events: list[bytes] = await self._link.insist(
            lambda: client.lrange(self._keys.log(lease.id), 0, lease.logged - 1)
        )
        return events

    def _run(self, held: Held) -> None:
        if self._to_model(Run(held.key, held.lease.payload, held.written)):
            held.sent_at = time.monotonic()

    def _run_suspect(self) -> None:
        """Run a suspect once nothing else is held."""
        if self._suspects and len(self._held) == len(self._suspects):
            self._alone = self._suspects.popleft()
            log.warning("job %s attempt %d: runs alone", self._alone.id, self._alone.attempt)
            self._run(self._alone)

    # -- telling -----------------------------------------------------------------------------------------------

    async def tell(self, step: Step) -> None:
        """One step's news to Redis, in one pipeline."""
        async with self._speaking:
            self._note_begun(step)
            spoken = list(self._calls_of(step))
            if spoken:
                reached("heard")
            answers = await self._link.run_all([call for _, call, _ in spoken])
            for (held, _, ends), answer in zip(spoken, answers, strict=True):
                reached("finished" if ends else "published")
                if ends:
                    self._after_end(held, answer)
                elif answer.outcome == "lost":
                    self._lose(held)
                elif answer.outcome == "cancel":
                    await self._end_cancelled(held)
                elif answer.outcome == "gap":
                    await self._give_up(held, answer.logged)

    def _note_begun(self, step: Step) -> None:
        for begun in step.begun:
            if (held := self._held.get(begun.key)) is not None:
                held.begun = begun

    def _calls_of(self, step: Step) -> Iterable[tuple[Held, Call[Any], bool]]:
        """(job, call, whether it ends the job) for each job that has something to say."""
        heard: dict[str, Held] = {}
        for piece in step.pieces:
            held = self._held.get(piece.key)
            if held is None:
                continue  # dropped since
            held.add(piece)
            heard[piece.key] = held
            if piece.finish_reason is not None:
                self.room_made.set()
        for held in heard.values():
            if held.error is not None:
                yield held, self._end(held, "failed", "error", held.error), True
            elif held.complete:
                yield held, self._end(held, "succeeded", "done"), True
            elif held.due():
                yield held, self._publish(held), False

    def _publish(self, held: Held) -> Call[Any]:
        first, events = held.take_events()
        return calls.publish(self._keys, held.id, held.attempt, first, events)

    def _end(
        self,
        held: Held,
        state: TerminalState,
        kind: TerminalType,
        error: JobError | None = None,
    ) -> Call[Any]:
        result = held.result(state, self.model_name, self._worker, error).encode()
        first, events = held.take_end(kind, error)
        dead_reason = error.code if error is not None and state == "dead" else ""
        return calls.finish(self._keys, held.id, held.attempt, state, result, first, events, dead_reason)

    def _after_end(self, held: Held, answer: str) -> None:
        if answer == "ok":
            log.debug("job %s attempt %d: ended", held.id, held.attempt)
            self._forget(held)
        else:
            self._lose(held)

    # -- losing ------------------------------------------------------------------------------------------------

    async def renew(self, lease_ms: int) -> None:
        """Keep every lease alive; hear which are lost or cancelled."""
        holding = list(self._held.values())
        if not holding:
            return
        pairs = [(held.id, held.attempt) for held in holding]
        answers = await self._link.run(calls.renew(self._keys, self._worker, lease_ms, pairs))
        reached("renewed")
        for held, answer in zip(holding, answers, strict=True):
            if held.key not in self._held:
                continue  # ended while the answer was on its way
            if answer == "lost":
                self._lose(held)
            elif answer == "cancel":
                await self.cancel(held.id)

    async def cancel(self, job_id: str) -> None:
        """End a job that is held, with what it has."""
        async with self._speaking:
            for held in [held for held in self._held.values() if held.id == job_id]:
                await self._end_cancelled(held)

    async def convict(self) -> None:
        """The process died while a suspect ran alone: dead letter. Does nothing if none did."""
        held = self._alone
        if held is None or held.sent_at is None:
            return
        message = (
            f"the process that ran it died {held.lease.crashes + 1} times, the last time with this job alone"
        )
        error = JobError(code=ErrorCode.CRASHED_WORKER, message=message)
        log.error("job %s attempt %d: dead letter: %s", held.id, held.attempt, message)
        async with self._speaking:
            await self._link.run(self._end(held, "dead", "dead", error))
            self._forget(held)

    async def hand_back(self, crashed: bool) -> None:
        """Log what is unlogged and release every lease; `crashed` counts against the jobs that were sent."""
        async with self._speaking:
            holding = list(self._held.values())
            if not holding:
                return
            await self._link.run_all([self._publish(held) for held in holding if held.unlogged])
            reached("checkpointed")
            handed = [
                Handback(held.id, held.attempt, crashed and held.sent_at is not None) for held in holding
            ]
            released = await self._link.run(calls.release(self._keys, self._worker, handed))
            reached("handed_back")
            log.info("handed back %d jobs", released)
            self._suspects.clear()
            for held in holding:
                self._forget(held)

    async def _end_cancelled(self, held: Held) -> None:
        log.info("job %s attempt %d: cancelled", held.id, held.attempt)
        self._to_model(Drop(held.key))
        error = JobError(code="cancelled", message="cancelled while it ran")
        call = self._end(held, "cancelled", "cancelled", error)
        self._after_end(held, await self._link.run(call))

    async def _give_up(self, held: Held, logged: int) -> None:
        """The server's log is shorter than what it acknowledged: start again from what it still has."""
        log.warning(
            "job %s attempt %d: the log lost events after %d: handed back", held.id, held.attempt, logged
        )
        self._to_model(Drop(held.key))
        await self._link.run(calls.release(self._keys, self._worker, [Handback(held.id, held.attempt)]))
        self._forget(held)

    def _lose(self, held: Held) -> None:
        log.warning("job %s attempt %d: lease lost, dropped", held.id, held.attempt)
        self._to_model(Drop(held.key))
        self._forget(held)

    def _forget(self, held: Held) -> None:
        if self._held.pop(held.key, None) is None:
            return  # a renewal found it lost while its end was on its way
        if held is self._alone:
            self._alone = None
        if not self._held:
            self.empty.set()
        self._run_suspect()
        self.room_made.set()
