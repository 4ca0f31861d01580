"""The loop of a bulk run.

    input -- to_do --> window ==> queue ==> worker
               |          |
               | bad      '-- ended --> spool (durable) --> forget on the server
               '------------------------^   '-- when all have an outcome --> output, errors

Redis holds the window, the disk holds the dataset. Killed at any moment, the same command goes on: what is in the
spool is done, what is on the queue is collected, the rest is submitted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from broker import calls
from broker.calls import Status
from broker.queue import Queue
from producer.bulk import records
from producer.bulk.intake import Ask
from producer.bulk.manifest import Manifest
from producer.bulk.places import Places
from producer.bulk.progress import Counts, Display, Speed
from producer.bulk.records import Outcome, Record
from producer.bulk.window import SILENCE_S, Ended, Window
from protocol import MillstreamError

BLOCK_S = 0.5
"""How long a step waits for a completion."""
BAD_AT_ONCE = 1000
LOOK_EVERY_S = 2.0
"""How often the workers' speed is asked for."""


class Store(Protocol):
    """Keeps records."""

    def append(self, records: Sequence[Record]) -> None:
        """Keep these; durable on return."""


class Run:
    """A run in this process; each `step` may be repeated after a fault of the server."""

    def __init__(
        self,
        to_do: Iterator[Ask | Record],
        window: Window,
        spool: Store,
        counts: Counts,
        screen: Display,
        served: Served,
        outlook: Outlook,
    ) -> None:
        self._to_do = to_do
        self._window = window
        self._spool = spool
        self._counts = counts
        self._screen = screen
        self._served = served
        self._outlook = outlook
        self._input_ended = False

    @property
    def answered(self) -> int:
        """How many jobs have ended since this process began."""
        return self._served.seen

    def step(self) -> bool:
        """Admit, submit, collect, store. False: every row has an outcome, and the server holds none of them.

        Raises:
            redis.RedisError: the server could not be reached; nothing is lost.
            MillstreamError: the disk is full, or another model answers now.
        """
        self._admit()
        full = not self._window.submit()
        if len(self._window):
            self._counts.speed = self._outlook.look(full)
            ended = self._window.collect(BLOCK_S)
            if ended:
                self._store(ended)
                self._outlook.heard()
            self._window.forget_stored()
        self._screen.show(self._counts)
        if len(self._window) or not self._input_ended:
            return True
        self._window.end()
        return False

    def _admit(self) -> None:
        bad: list[Record] = []
        while self._window.has_room and len(bad) < BAD_AT_ONCE:
            match next(self._to_do, None):
                case None:
                    self._input_ended = True
                    break
                case Record() as record:
                    bad.append(record)
                case Ask() as asked:
                    self._window.admit(asked)
        self._keep(bad)

    def _store(self, ended: Sequence[Ended]) -> None:
        for one in ended:
            self._served.check(one.result)
            self._counts.ended += 1
            if one.result.usage:
                self._counts.prompt_tokens += one.result.usage.prompt_tokens
                self._counts.completion_tokens += one.result.usage.completion_tokens
        self._keep([records.of_result(one.row, one.result) for one in ended])

    def _keep(self, done: Sequence[Record]) -> None:
        self._spool.append(done)
        answered = sum(record.answered for record in done)
        self._counts.answered += answered
        self._counts.failed += len(done) - answered


class Served:
    """Keeps one output to one model, also where the command names none."""

    def __init__(self, manifest: Manifest, places: Places) -> None:
        self._manifest = manifest
        self._places = places
        self.seen = 0
        """How many results have come in this process."""

    def check(self, result: Outcome) -> None:
        """Note which model answers.

        Raises:
            MillstreamError: it is not the one that answered before.
        """
        self.seen += 1
        if result.model is None or result.model == self._manifest.served:
            return
        if self._manifest.served is not None:
            raise MillstreamError(
                f"the queue is served by {result.model} now, and {self._places.output} has answers of "
                f"{self._manifest.served}: start that model again, or --overwrite"
            )
        self._manifest.served = result.model
        self._manifest.save(self._places.manifest)


class Outlook:
    """What a run sees of the queue while it waits: how fast its workers write, and, said once, why nothing ends."""

    def __init__(self, queue: Queue, screen: Display, *, own_worker: bool) -> None:
        self._queue = queue
        self._screen = screen
        self._own_worker = own_worker
        self._next_look = 0.0
        self._heard = float("-inf")
        self._speed = Speed()
        self._said: str | None = None

    def heard(self) -> None:
        """Jobs end: there is nothing to explain for a while."""
        self._heard = time.monotonic()

    def look(self, full: bool) -> Speed:
        """What the queue's workers did at the last look; `full`: the queue took no more rows."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            status = self._queue.run(calls.status(self._queue.keys))
            self._speed = Speed.of(status.workers)
            if now - self._heard > SILENCE_S:
                self._explain(status, full)
        return self._speed

    def _explain(self, status: Status, full: bool) -> None:
        why = self._reason(status, full)
        if why is not None and why != self._said:
            self._screen.note(why)
        self._said = why

    def _reason(self, status: Status, full: bool) -> str | None:
        name = self._queue.keys.queue
        if status.paused:
            return f"queue {name} is paused"
        if not any(beat.alive for beat in status.workers):
            if self._own_worker:
                return "the worker is loading the model"
            if status.loading:
                return f"no worker serves queue {name} yet: one loads its model"
            return f"no worker serves queue {name} yet: start `millstream worker --model M --queue {name}`"
        return f"queue {name} is full: waiting for room" if full else None
