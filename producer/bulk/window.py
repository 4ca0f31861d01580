"""The rows a run has on the queue: submitted in pipelines, collected as they end, looked for when they do not.

    admit -> waiting -- submit --> in flight -- collect --> ended -- forget, once durable -->
               ^                      |
               '---- the server has lost it

Every step may be repeated after a lost connection: job ids are made of run and row, so nothing runs twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain

import msgspec
import redis

from broker import calls
from broker.completions import Completion, Completions
from broker.epoch import Epoch
from broker.queue import Queue
from producer.bulk.intake import Ask
from producer.bulk.lines import Row
from producer.bulk.records import Outcome
from producer.request import SUBMIT_AT_ONCE
from protocol import TERMINAL_STATES

MOST_BYTES = 64 << 20
"""Bytes of input lines in the window: rows of megabytes do not fill the memory."""
SILENCE_S = 5.0
"""After this long without a completion the window is compared with what the server has."""
EPOCH_S = 2.0
"""How often the server is asked whether it is the one that took the rows; if not, the window is compared at once."""
_NO_ENTRY = "0-1"
"""Stands for the announcement of a job whose announcement was lost."""


class Ended(msgspec.Struct, frozen=True):
    """A row whose job has ended."""

    row: Row
    result: Outcome


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
        self._stored: list[Completion] = []
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
        self._waiting[ask.asked.id] = ask
        self._bytes += ask.size

    def submit(self) -> bool:
        """Queue the rows that wait. False: the queue is full, and some still wait.

        Raises:
            redis.RedisError: the server could not be reached; submit again.
        """
        for batch in _batches(list(self._waiting), SUBMIT_AT_ONCE):
            jobs = [self._waiting[job_id].asked.args for job_id in batch]
            try:
                parts = self._queue.run_all(calls.submit_encoded(self._queue.keys, jobs))
            except redis.OutOfMemoryError:
                return False
            for job_id, answer in zip(batch, chain.from_iterable(parts), strict=True):
                if answer.outcome == "full":
                    return False
                # A conflict is the same row in another version's encoding: run and digest are in the id.
                self._in_flight[job_id] = self._waiting.pop(job_id)
        return True

    def collect(self, block_s: float) -> list[Ended]:
        """The rows that have ended, waiting at most `block_s` for the first; each is given out once.

        Raises:
            redis.RedisError: the server could not be reached; collect again.
        """
        early = self._in_flight.keys() & self._early.keys()
        found = self._completions.read(0.0 if early else block_s)
        found += [self._early.pop(job_id) for job_id in early]
        if self._may_have_lost():
            self._completions.rewind()
            found += self._look_for_lost()
        elif not found and time.monotonic() - self._heard > SILENCE_S:
            found = self._look_for_lost()
        if found:
            self._heard = time.monotonic()
        return [ended for completion in found if (ended := self._take(completion)) is not None]

    def forget_stored(self) -> None:
        """Delete the jobs given out so far: their rows are durable.

        Raises:
            redis.RedisError: the server could not be reached; nothing is lost, the next call does it.
        """
        self._completions.forget(self._stored)
        self._stored.clear()

    def end(self) -> None:
        """Delete what the run still has on the server."""
        self._stored += self._early.values()
        self._early.clear()
        self.forget_stored()
        self._completions.end()

    def _take(self, completion: Completion) -> Ended | None:
        if completion.raw is None:
            return None  # expired before it was read; the silence that follows finds the row
        ask = self._in_flight.pop(completion.id, None)
        if ask is None:
            self._early[completion.id] = completion
            return None
        self._bytes -= ask.size
        self._stored.append(completion)
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
        self._heard = time.monotonic()
        unheard: list[Completion] = []
        for batch in _batches(list(self._in_flight), SUBMIT_AT_ONCE):
            looks = self._queue.run_all([calls.look(self._queue.keys, job_id) for job_id in batch])
            for job_id, look in zip(batch, looks, strict=True):
                if look.result is not None:
                    unheard.append(Completion(_NO_ENTRY, job_id, look.result.encode()))
                elif look.state is None or look.state in TERMINAL_STATES:
                    self._completions.forget([Completion(_NO_ENTRY, job_id, None)])
                    self._waiting[job_id] = self._in_flight.pop(job_id)
        return unheard


def _batches(ids: Sequence[str], size: int) -> list[Sequence[str]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]
