"""A slice of a batch: what its status asks for, for a while; then the next one is put in line.

    status        the slice                                              goes over to
    validating    reads and checks every row (validating.py)             in_progress, failed
    in_progress   asks and collects (asking.py), a minute at most        finalizing, once every row is done
    cancelling    stops what runs (stopping.py), makes the files         cancelled
    finalizing    the same where its window is over; makes the files     completed, expired
    ended         tells the webhook (webhook.py)

Killed at any moment, it is done again: the folder says what is done, the hash which slice may go on. One process has
the folder at a time; one that was given up, and lives, can tell the server nothing.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import redis
import rq

from broker import batches
from broker.batches import ENDED, Batch, Start, Status
from broker.connection import connect
from broker.keys import keys_of
from broker.queue import Queue
from producer.batch import webhook
from producer.batch.asking import run_rows
from producer.batch.chain import Chain
from producer.batch.finalising import finalise
from producer.batch.folder import Folder
from producer.batch.outcomes import opened
from producer.batch.stopping import stop_rows
from producer.batch.validating import validate
from producer.reach import OUTAGE_S, Server, faults_in_one_line
from producer.refusal import Refused
from protocol import MillstreamError, RequestError

LONGEST_S = 60.0
SHORTEST_S = 5.0
"""A slice makes room for other batches' slices after this long."""
log = logging.getLogger("millstream.batch")
leave = threading.Event()
"""Set where the process is to end: the slice at work ends early."""


def work(queue: str, batch_id: str, number: int) -> None:
    """Work on a batch: what the RQ job of a slice calls. Faults are logged, and what the batch shows of them."""
    job = rq.get_current_job()
    assert job is not None
    assert job.connection is not None
    chain = Chain(job.connection, queue)
    with Server(None) as server:
        keys = keys_of(queue)
        held = Queue(connect(server.url, keys, OUTAGE_S), keys)
        try:
            with faults_in_one_line(server.url):
                Slice(held, chain, batch_id, number).work()
        except (MillstreamError, OSError) as error:
            log.warning("%s: slice %d stopped, and is tried again: %s", batch_id, number, error)
            _explain(held, batch_id, str(error))
        finally:
            held.close()


def _explain(queue: Queue, batch_id: str, why: str) -> None:
    try:
        batches.explain(queue, batch_id, why)
    except redis.RedisError:
        log.warning("%s: the server is away, and cannot be told", batch_id)


@dataclass(frozen=True, slots=True)
class Slice:
    """The right to work on a batch for a while."""

    queue: Queue
    chain: Chain
    batch_id: str
    number: int
    by: str = field(default_factory=lambda: secrets.token_hex(8))

    def work(self) -> None:
        """Do what the batch's status asks for, and put the next slice in line.

        Raises:
            redis.RedisError, MillstreamError, OSError: it had to stop; the sweep puts another one in line.
        """
        batch = batches.show(self.queue, self.batch_id)
        if batch is None or batch.slice != self.number:
            log.info("%s: slice %d is not the one to go on", self.batch_id, self.number)
            return
        folder = Folder(Path(batch.folder))
        with folder.locked() as mine:
            status = self._note() if mine else None
            if status is None:
                log.info("%s: slice %d: another process works on it", self.batch_id, self.number)
                return
            now = self._do(batch, status, folder)
            if now is not None and (now not in ENDED or batch.webhook == "wanted"):
                self.chain.put(self.batch_id, self.number + 1)

    def _do(self, batch: Batch, status: Status, folder: Folder) -> Status | None:
        """The status after the slice; None: nothing more is to do now."""
        match status:
            case "validating":
                return self._validate(batch, folder)
            case "in_progress":
                return self._run(folder)
            case "cancelling" | "finalizing":
                return self._end(folder)
            case _:
                self._tell(batch, folder)
                return None

    def _validate(self, batch: Batch, folder: Folder) -> Status | None:
        try:
            checked = validate(folder)
        except (Refused, RequestError) as error:
            fault = {"code": "invalid_input", "message": str(error), "line": None, "param": None}
            return self._advance("*", "failed", errors=json.dumps([fault]), **_telling(batch))
        return self._advance(
            "validating",  # cancelled meanwhile, it stays so
            "in_progress",
            checked=1,
            total=checked.total,
            failed=checked.bad,
            endpoint=checked.endpoint,
            torn=json.dumps(checked.torn),
        )

    def _run(self, folder: Folder) -> Status | None:
        began = time.monotonic()
        with opened(folder) as (outcomes, rows):

            def go_on(why_not: str) -> bool:
                if self._note((outcomes.answered, outcomes.failed)) != "in_progress":
                    return False
                if why_not:
                    batches.explain(self.queue, self.batch_id, why_not)
                longest_s = SHORTEST_S if self.chain.others_wait() else LONGEST_S
                return time.monotonic() - began < longest_s and not leave.is_set()

            all_done = run_rows(folder, self.queue, outcomes, rows, go_on)
            self._note((outcomes.answered, outcomes.failed))
        return self._advance("in_progress", "finalizing" if all_done else None)

    def _end(self, folder: Folder) -> Status | None:
        batch = batches.show(self.queue, self.batch_id)
        if batch is None:
            return None
        if not batch.checked:  # cancelled before: its rows are counted first
            return self._validate(batch, folder)
        if batch.ending != "completed":
            with opened(folder) as (outcomes, rows):
                stop_rows(folder, self.queue, outcomes, rows, batch.ending)
        answered, failed = finalise(folder)
        status = self._advance("*", batch.ending, completed=answered, failed=failed, **_telling(batch))
        if status is not None:
            folder.drop_work()
        return status

    def _tell(self, batch: Batch, folder: Folder) -> None:
        url = folder.order().webhook
        if url is None or batch.webhook != "due":
            return
        fault = webhook.post(url, batch)
        if fault is None:
            self._advance("*", None, webhook="delivered")
            log.info("%s: the webhook has been told", self.batch_id)
            return
        tries = batch.webhook_tries + 1
        log.warning("%s: the webhook could not be told (try %d): %s", self.batch_id, tries, fault)
        if tries == webhook.MOST_TRIES:
            self._advance("*", None, webhook="given up", webhook_tries=tries, note=f"webhook: {fault}")
            return
        due = batches.server_time(self.queue) + webhook.wait_s(tries)
        self._advance("*", None, webhook_tries=tries, webhook_at=due, note=f"webhook: {fault}")

    def _note(self, done: tuple[int, int] | None = None) -> Status | None:
        return self.queue.run(batches.note(self.queue.keys, self.batch_id, self.number, done))

    def _advance(self, start: Start, to: Status | None, **fields: str | int) -> Status | None:
        call = batches.advance(self.queue.keys, self.batch_id, self.number, self.by, start, to, **fields)
        status = self.queue.run(call)
        if status is not None and status == to:
            log.info("%s: %s", self.batch_id, status)
        return status


def _telling(batch: Batch) -> dict[str, str]:
    """What the hash is told of the webhook when a batch ends."""
    return {"webhook": "due"} if batch.webhook == "wanted" else {}
