"""The rows a run has on the queue: submitted in pipelines, collected as they end, looked for when they do not.

    admit -> waiting -- submit --> in flight -- collect --> ended -- forget, once durable -->
               ^                      |
               '---- the server has lost it, or had no room

Replies are waited for in other threads, while rows are made and stored (waiting for them was half of a run's time):

    caller   collect | store | make rows | submit | collect ...
    sending          |       |           |  '-- forget, submit, reply --> settled by the next submit
    reading          |-- completions ------> the next collect

Every step may be repeated after a lost connection: job ids are made of run and row, so nothing runs twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from itertools import chain
from typing import TypeVar

import msgspec
import redis

from broker import calls
from broker.completions import NO_ENTRY, Completion, Completions
from broker.epoch import Epoch
from broker.queue import Queue
from producer.bulk.aside import aside
from producer.bulk.intake import Ask
from producer.bulk.lines import Row
from producer.bulk.records import Outcome
from producer.request import SUBMIT_AT_ONCE
from protocol import TERMINAL_STATES

T = TypeVar("T")

MOST_BYTES = 64 << 20
"""Bytes of input lines in the window: rows of megabytes do not fill the memory."""
SILENCE_S = 5.0
"""After this long without a completion the window is compared with what the server has."""
EPOCH_S = 2.0
"""How often the server is asked whether it is the one that took the rows; if not, the window is compared at once."""
CLOSING_S = 1.0


class Ended(msgspec.Struct, frozen=True):
    """A row whose job has ended."""

    row: Row
    result: Outcome


class _Sending(msgspec.Struct, frozen=True):
    """What was sent, and has no reply yet."""

    asks: dict[str, Ask]
    stored: list[Completion]
    taken: Future[int]
    """How many of the rows were taken, the first ones."""


class Window:
    """The window of one run; it owns which rows are where."""

    def __init__(self, queue: Queue, run: str, most_rows: int) -> None:
        self._queue = queue
        self._completions = Completions(queue, run)
        self._most_rows = most_rows
        self._bytes = 0
        self._waiting: dict[str, Ask] = {}
        self._in_flight: dict[str, Ask] = {}
        self._early: dict[str, Completion] = {}
        """Ended before they were admitted: an earlier process of this run had them in its window."""
        self._given: list[Completion] = []
        """Given out, and not known to be stored."""
        self._stored: list[Completion] = []
        self._sending: _Sending | None = None
        self._reading: Future[list[Completion]] | None = None
        self._heard = time.monotonic()
        self._epoch = Epoch(queue)
        self._epoch_seen = float("-inf")

    def __len__(self) -> int:
        """Rows in the window."""
        return len(self._waiting) + len(self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether another row may be admitted."""
        return len(self) < self._most_rows and self._bytes < MOST_BYTES

    def admit(self, ask: Ask) -> None:
        """Take a row in."""
        self._waiting[ask.row_job.id] = ask
        self._bytes += ask.size

    def submit(self) -> bool:
        """Send the rows that wait to the queue, unless the last ones have no reply yet. False: not all of these were
        taken, since the queue is full; they wait again.

        Raises:
            redis.RedisError: the server could not be reached the last time; submit again.
        """
        if self._sending is not None and not self._sending.taken.done():
            return True
        took_all = self.settle()
        if self._waiting or self._stored:
            asks, self._waiting = self._waiting, {}
            stored, self._stored = self._stored, []
            self._in_flight |= asks
            self._sending = _Sending(asks, stored, aside(lambda: self._send(list(asks.values()), stored)))
        return took_all

    def settle(self) -> bool:
        """Wait for the replies to what was sent. False: as `submit`.

        Raises:
            redis.RedisError: the server could not be reached; the next `submit` sends all of it again.
        """
        if self._sending is None:
            return True
        sent, self._sending = self._sending, None
        taken = 0
        try:
            taken = sent.taken.result()
        except redis.RedisError:
            self._stored = sent.stored + self._stored
            raise
        finally:
            refused = [job_id for job_id in list(sent.asks)[taken:] if job_id in self._in_flight]
            self._waiting = {job_id: self._in_flight.pop(job_id) for job_id in refused} | self._waiting
        return taken == len(sent.asks)

    def collect(self, block_s: float) -> list[Ended]:
        """The rows that have ended, waiting at most `block_s` for the first; each is given out once.

        Raises:
            redis.RedisError: the server could not be reached; collect again.
        """
        early = self._in_flight.keys() & self._early.keys()
        if early:
            found = [self._early.pop(job_id) for job_id in early]
        else:
            found = self._read(block_s)
            if self._may_have_lost():
                self._completions.rewind()
                found += self._look_for_lost()
            elif not found and time.monotonic() - self._heard > SILENCE_S:
                found = self._look_for_lost()
        if found:
            self._heard = time.monotonic()
        ended = [one for completion in found if (one := self._take(completion)) is not None]
        if found and self._in_flight and self._reading is None:
            self._reading = aside(lambda: self._completions.read(block_s))
        return ended

    def forget_stored(self) -> None:
        """Delete the jobs of the rows given out so far, which are durable, with the next `submit`."""
        self._stored += self._given
        self._given.clear()

    def leave(self) -> None:
        """Delete the jobs of the rows that are durable, and leave the others on the queue.

        Raises:
            redis.RedisError: the server could not be reached; nothing is lost, the next call does it.
        """
        self.settle()
        self._completions.forget(self._stored)
        self._stored.clear()

    def close(self) -> None:
        """Let what is on its way arrive, for `CLOSING_S`: the run may go on elsewhere, and have these rows answered
        and forgotten before they are submitted."""
        if self._sending is not None:
            wait([self._sending.taken], CLOSING_S)

    def end(self) -> None:
        """Delete what the run still has on the server. Raises as `leave`."""
        self._stored += self._early.values()
        self._early.clear()
        self.leave()
        self._completions.end()

    def _send(self, asks: Sequence[Ask], stored: Sequence[Completion]) -> int:
        """Delete jobs, and submit others; how many of these were taken, the first ones."""
        self._completions.forget(stored)
        taken = 0
        for batch in _batches(asks, SUBMIT_AT_ONCE):
            jobs = [ask.row_job.args for ask in batch]
            try:
                parts = self._queue.run_all(calls.submit_encoded(self._queue.keys, jobs))
            except redis.OutOfMemoryError:
                break
            # A conflict is the same row in another version's encoding: run and digest are in the id.
            outcomes = [answer.outcome for answer in chain.from_iterable(parts)]
            if "full" in outcomes:
                return taken + outcomes.index("full")
            taken += len(batch)
        return taken

    def _read(self, block_s: float) -> list[Completion]:
        """The next completions. A read that was under way, and found none, is over for some time."""
        reading, self._reading = self._reading, None
        found = reading.result() if reading is not None else []
        return found or self._completions.read(block_s)

    def _take(self, completion: Completion) -> Ended | None:
        ask = self._in_flight.pop(completion.id, None)
        if ask is None:
            self._early[completion.id] = completion
            return None
        self._bytes -= ask.size
        self._given.append(completion)
        return Ended(ask.row, Outcome.decode(completion.raw))

    def _may_have_lost(self) -> bool:
        """Whether the server restarted, was replaced or emptied since it was last asked."""
        now = time.monotonic()
        if now - self._epoch_seen < EPOCH_S:
            return False
        self._epoch_seen = now
        return self._epoch.has_changed()

    def _look_for_lost(self) -> list[Completion]:
        """Rows whose end was not heard; those whose job is gone are submitted again."""
        self.settle()
        self._heard = time.monotonic()
        unheard: list[Completion] = []
        for batch in _batches(list(self._in_flight), SUBMIT_AT_ONCE):
            looks = self._queue.run_all([calls.look(self._queue.keys, job_id) for job_id in batch])
            for job_id, look in zip(batch, looks, strict=True):
                if look.result is not None:
                    unheard.append(Completion(NO_ENTRY, job_id, look.result.encode()))
                elif look.state is None or look.state in TERMINAL_STATES:
                    self._completions.forget([Completion(NO_ENTRY, job_id, b"")])
                    self._waiting[job_id] = self._in_flight.pop(job_id)
        return unheard


def _batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
