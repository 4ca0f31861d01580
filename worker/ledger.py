"""What a worker holds, and everything it says about it to Redis.

Each job is fenced by its attempt: what is said for a lease that was lost is refused, and the job dropped. Whoever
speaks does so under `_speaking`, so that a job's events and its end never overtake each other.

    take --> runs, or waits to run alone --.--> ended         its last events, its result
                                           |--> tried again   an error that can pass: handed back, not before a while
                                           |--> stopped       cancelled, its time is over, or its log cannot be read
                                           |--> handed back   the worker stops, or its model process has ended
                                           '--> lost          somebody else has it: dropped
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain, count
from typing import Any

from broker import calls
from broker.calls import Handback, Lease, News
from broker.failpoints import reached
from broker.parts import in_parts
from broker.script import Call
from engine.interface import DeviceLost
from protocol.errors import MAY_PASS
from worker.backoff import backoff_s
from worker.ends import bytes_of, ending, own_end
from worker.frames import Drop, Run, Step, ToModel
from worker.held import CANCELLED, EXPIRED, Held, Stop
from worker.link import Link
from worker.model_process import ModelCrashed
from worker.quarantine import Quarantine, is_suspect
from worker.resume import read_logs

log = logging.getLogger("millstream.worker")


class Ledger:
    """The jobs of one worker, by the key under which the model process knows them."""

    def __init__(self, link: Link, worker: str, to_model: Callable[[ToModel], bool]) -> None:
        self.model_name = ""
        self.empty = asyncio.Event()
        self.empty.set()
        self.room_made = asyncio.Event()
        self.num_finished = 0
        """Jobs that the model process has brought to their end: neither stopped nor failed by the device."""
        self.retried_until = 0.0
        """When the last job that was handed back to be tried again may be had, monotonic."""
        self._link = link
        self._keys = link.keys
        self._worker = worker
        self._to_model = to_model
        self._held: dict[str, Held] = {}
        self._taking: dict[str, Held] = {}
        """Leased by the last reply, and not held before their logs are read: renewed like the others."""
        self._quarantine = Quarantine()
        self._cancelled_early: set[str] = set()
        """Jobs not held that were said to be cancelled since leases were asked for: theirs may be on their way."""
        self._numbers = count(1)
        """Of leases: no two have one key, however often a server grants the same attempt."""
        self._look_who_stops = asyncio.Event()
        """A job is to be stopped, or has a deadline."""
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
    def _names(self) -> tuple[str, str]:
        """Model and worker, as they stand in results."""
        return self.model_name, self._worker

    @property
    def quarantined(self) -> bool:
        """Whether a suspect waits or runs: nothing may run beside it."""
        return bool(self._quarantine)

    # -- taking ------------------------------------------------------------------------------------------------

    def forget_hints(self) -> None:
        """Leases are asked for from now on: a job that was said to be cancelled before is never granted."""
        self._cancelled_early.clear()

    async def take(self, leases: Sequence[Lease]) -> None:
        """Hold what a reply that has just come granted, and run it."""
        self._drop_earlier({lease.id for lease in leases})
        taking = {held.key: held for held in (Held(lease, next(self._numbers)) for lease in leases)}
        for held in taking.values():
            log.debug("job %s attempt %d: leased", held.id, held.attempt)
        self._taking = taking
        await read_logs(self._link, taking.values())
        self._taking = {}
        for held in taking.values():  # but for those that a renewal has found lost meanwhile
            self._hold(held)
        self._run_suspect()

    def _drop_earlier(self, ids: set[str]) -> None:
        """A server that has lost data may grant a job that this worker still holds, even as the same attempt."""
        for held in [held for held in self._held.values() if held.id in ids]:
            self._lose(held)

    def _hold(self, held: Held) -> None:
        self._held[held.key] = held
        self.empty.clear()
        if held.id in self._cancelled_early:
            held.stop = CANCELLED
        if held.stop_at < math.inf:
            self._look_who_stops.set()
        if held.stop is None and is_suspect(held.lease):
            self._quarantine.add(held)
        elif held.stop is None:
            self._run(held)

    def run_again(self) -> None:
        """Run what was leased while there was no model process."""
        for held in self._held.values():
            if held not in self._quarantine:
                self._run(held)

    def _run(self, held: Held) -> None:
        """Send a job to the model process, unless it is about to end: its Drop may have been said, or never will be.

        A suspect is to blame once it has arrived: the process may be dying already, and the ends of its neighbours,
        which made it be alone, its last words.
        """
        if held.has_let_go or held.stop is not None:
            return
        alone = held is self._quarantine.alone
        if self._to_model(Run(held.key, held.lease.payload, held.written, alone)):
            held.sent_at = time.monotonic()
            held.may_be_to_blame = not alone

    def _run_suspect(self) -> None:
        """Run a suspect once nothing else is held."""
        held = self._quarantine.next(len(self._held) + len(self._taking))
        if held is not None:
            log.warning("job %s attempt %d: runs alone", held.id, held.attempt)
            self._run(held)

    # -- telling -----------------------------------------------------------------------------------------------

    async def tell(self, steps: Sequence[Step]) -> None:
        """The news of steps to Redis, in one pipeline."""
        async with self._speaking:
            again: dict[str, str] = {}
            told: dict[str, Held] = {}
            for step in steps:
                self._hear(step, told, again)
            ended, due = _with_news(told.values())
            if ended or due:
                reached("heard")
            finishing = [
                calls.finish_all(self._keys, self._worker, part)
                for part in in_parts((own_end(held, *self._names) for held in ended), bytes_of)
            ]
            answers = await self._link.run_all([*finishing, *self._publish(due)])
            for held, end in zip(ended, chain.from_iterable(answers[: len(finishing)]), strict=True):
                reached("finished")
                self.num_finished += end == "ok" and not (held.error and held.error.code in MAY_PASS)
                await self._after_end(held, end)
            for held, answer in zip(due, chain.from_iterable(answers[len(finishing) :]), strict=True):
                reached("published")
                if answer.outcome == "lost":
                    self._lose(held)
                elif answer.outcome == "cancel":
                    self.cancel(held.id)
                elif answer.outcome == "gap":
                    await self._give_up(held)
            if again:
                await self._try_again(again)

    def _hear(self, step: Step, told: dict[str, Held], again: dict[str, str]) -> None:
        """Take in a step, and note by key whom it tells of, and of jobs that are to be tried again, why."""
        for key in step.arrived:
            if (suspect := self._held.get(key)) is not None:
                suspect.may_be_to_blame = True
        streamed: dict[str, Held] = {}
        for begun in step.begun:
            if (held := self._held.get(begun.key)) is not None:
                held.begin(begun)
        for piece in step.pieces:
            held = self._held.get(piece.key)
            if held is None:
                continue  # dropped since
            told[piece.key] = held
            if held.is_streamed:
                streamed[piece.key] = held
            if piece.error_code in MAY_PASS and held.has_retries:
                # Its text was held back by the tokens that are logged, and will be again when they go on.
                again[piece.key] = piece.error_message or ""
            else:
                held.add(piece)
            if piece.finish_reason is not None:
                self.room_made.set()
        for held in streamed.values():
            held.end_step()

    def _publish(self, due: Iterable[Held]) -> list[Call[Any]]:
        """The calls that log and publish what is unlogged."""
        news = (News(held.id, held.attempt, *held.take_events()) for held in due)
        return [calls.publish_all(self._keys, self._worker, part) for part in in_parts(news, bytes_of)]

    async def _end(self, held: Held, stop: Stop) -> None:
        """End one job otherwise than the model process did."""
        end = ending(held, *stop, *self._names)
        (answer,) = await self._link.run(calls.finish_all(self._keys, self._worker, [end]))
        await self._after_end(held, answer)

    async def _after_end(self, held: Held, answer: str) -> None:
        if answer == "ok":
            log.debug("job %s attempt %d: ended", held.id, held.attempt)
            self._forget(held)
        elif answer == "gap":
            await self._give_up(held)
        else:
            self._lose(held)

    async def _try_again(self, again: dict[str, str]) -> None:
        """Hand back jobs whose error can pass, with what was made of them."""
        later: list[Handback] = []
        holding = [self._held[key] for key in again if key in self._held]
        for held in holding:
            wait_s = backoff_s(held.lease.retries)
            log.warning(
                "job %s attempt %d: tried again in %.1f s, retry %d of %d: %s",
                held.id,
                held.attempt,
                wait_s,
                held.lease.retries + 1,
                held.lease.max_retries,
                again[held.key],
            )
            later.append(self._later(held, wait_s))
        spoken = self._publish(held for held in holding if held.unlogged)
        for held in holding:
            held.has_let_go = True
        await self._link.run_all([*spoken, calls.release(self._keys, self._worker, later)])
        for key in again:
            if key in self._held:
                self._forget(self._held[key])

    def _later(self, held: Held, wait_s: float) -> Handback:
        self.retried_until = max(self.retried_until, time.monotonic() + wait_s)
        return Handback(held.id, held.attempt, retry_in_ms=max(1, round(1000 * wait_s)))

    # -- stopping ----------------------------------------------------------------------------------------------

    async def stop_in_time(self) -> None:
        """Stop each job that is to be stopped, or whose deadline has come, for ever."""
        while True:
            self._look_who_stops.clear()
            soonest = min((held.stop_at for held in self._held.values()), default=math.inf)
            left = soonest - time.monotonic()
            if left > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left if left < math.inf else None):
                        await self._look_who_stops.wait()
                continue
            async with self._speaking:
                for held in [held for held in self._held.values() if held.stop_at <= time.monotonic()]:
                    if held.key not in self._held:
                        continue  # lost while another's end was told
                    stop = held.stop or EXPIRED
                    log.info("job %s attempt %d: %s", held.id, held.attempt, stop.state)
                    self._to_model(Drop(held.key))
                    await self._end(held, stop)

    def cancel(self, job_id: str) -> None:
        """Stop a job that is held, or just being leased, with what it has."""
        holding = [held for held in self._held.values() if held.id == job_id]
        if not holding:
            self._cancelled_early.add(job_id)
        for held in holding:
            held.stop = held.stop or CANCELLED
            self._look_who_stops.set()

    # -- losing ------------------------------------------------------------------------------------------------

    async def renew(self, lease_ms: int) -> None:
        """Keep every lease alive; hear which are lost or cancelled."""
        holding = [*self._held.values(), *self._taking.values()]
        if not holding:
            return
        pairs = [(held.id, held.attempt) for held in holding]
        answers = await self._link.run(calls.renew(self._keys, self._worker, lease_ms, pairs))
        reached("renewed")
        for held, answer in zip(holding, answers, strict=True):
            if held.has_let_go:
                continue  # ended, or handed back, while the answer was on its way
            if answer == "lost":
                self._lose(held)
            elif answer == "cancel":
                self.cancel(held.id)

    async def convict(self, error: ModelCrashed | DeviceLost) -> None:
        """The process ended while a suspect ran alone: end that job, unless none did or it may be tried again."""
        convicted = self._quarantine.convicted(error)
        if convicted is None:
            return
        held, stop = convicted
        log.error("job %s attempt %d: %s: %s", held.id, held.attempt, stop.error.code, stop.error.message)
        async with self._speaking:
            await self._end(held, stop)

    async def hand_back(self) -> None:
        """Log what is unlogged and release every lease, so that others can take the jobs at once."""
        await self._hand_back(lambda held: Handback(held.id, held.attempt))

    async def hand_back_crashed(self) -> None:
        """The same after the model process has died, which counts against the jobs that were sent."""
        await self._hand_back(lambda held: Handback(held.id, held.attempt, held.may_be_to_blame))

    async def hand_back_for_later(self) -> None:
        """The same after the device has failed: the jobs that were sent wait for a while."""

        def handed(held: Held) -> Handback:
            if not held.may_be_to_blame:
                return Handback(held.id, held.attempt)
            return self._later(held, backoff_s(held.lease.retries))

        await self._hand_back(handed)

    async def _hand_back(self, handed: Callable[[Held], Handback]) -> None:
        async with self._speaking:
            holding = list(self._held.values())
            if not holding:
                return
            await self._link.run_all(self._publish(held for held in holding if held.unlogged))
            reached("checkpointed")
            call = calls.release(self._keys, self._worker, [handed(held) for held in holding])
            for held in holding:
                held.has_let_go = True
            released = await self._link.run(call)
            reached("handed_back")
            log.info("jobs handed back: %d", released)
            for held in holding:
                log.debug("job %s attempt %d: handed back", held.id, held.attempt)
                self._quarantine.forget(held)  # all of them, before one is found to be alone
            for held in holding:
                self._forget(held)

    async def _give_up(self, held: Held) -> None:
        """The server's log is shorter than what it acknowledged: start again from what it still has."""
        if held.key not in self._held:
            return  # it was dropped while the answer was on its way, and its attempt may be granted again
        log.warning("job %s attempt %d: the log has lost events: handed back", held.id, held.attempt)
        self._to_model(Drop(held.key))
        held.has_let_go = True
        await self._link.run(calls.release(self._keys, self._worker, [Handback(held.id, held.attempt)]))
        self._forget(held)

    def _lose(self, held: Held) -> None:
        if held.key not in self._held and held.key not in self._taking:
            return  # it was dropped while the answer was on its way
        log.warning("job %s attempt %d: lease lost, dropped", held.id, held.attempt)
        self._to_model(Drop(held.key))
        self._taking.pop(held.key, None)
        self._forget(held)

    def _forget(self, held: Held) -> None:
        if self._held.pop(held.key, None) is None:
            return  # a renewal found it lost while its end was on its way
        self._quarantine.forget(held)
        if not self._held:
            self.empty.set()
        self._run_suspect()
        self.room_made.set()


def _with_news(told: Iterable[Held]) -> tuple[list[Held], list[Held]]:
    """Of these jobs the ones that have ended, and those that have something to log."""
    ended, due = [], []
    for held in told:
        if held.error is not None or held.complete:
            ended.append(held)
        elif held.due():
            due.append(held)
    return ended, due
