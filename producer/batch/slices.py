"""A slice of a batch: what its status asks for, for a while; then the next one is put in line.

    status        its slices                                             go over to
    validating    read and check every row (validating.py)               in_progress, failed
    in_progress   ask and collect (asking.py)                            finalizing, once every row is done
    cancelling    stop what runs (stopping.py), make the files           cancelled
    finalizing    the same where its window is over; make the files      completed, expired
    ended         tells the webhook (webhook.py)

Each ends after a minute at most, and the next one goes on where it stopped.

Killed at any moment, it is done again: the folder says what is done, the hash which slice may go on. One process has
the folder at a time; one that was given up, and lives, can tell the server nothing.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from producer.batch.folder import Checked, Ended, Folder
from producer.batch.outcomes import opened
from producer.batch.stopping import stop_rows
from producer.batch.sweeping import sweep
from producer.batch.validating import validate
from producer.reach import OUTAGE_S, Server, faults_in_one_line
from producer.refusal import Refused, first_line
from protocol import MillstreamError, RequestError

LONGEST_S = 60.0
SHORTEST_S = 5.0
"""A slice makes room for other batches' slices after this long."""
log = logging.getLogger("millstream.batch")
told_to_leave = threading.Event()
"""Set where the process is to end: the slice at work ends early."""


def work(queue: str, batch_id: str, number: int) -> None:
    """Work on a batch: what the RQ job of a slice calls. Faults are logged, and what the batch shows of them."""
    with _at_hand(queue) as (held, chain, url):
        try:
            with faults_in_one_line(url):
                Slice(held, chain, batch_id, number).work()
        except (MillstreamError, OSError) as error:
            log.warning("%s: slice %d stopped, and is tried again: %s", batch_id, number, error)
            _explain(held, batch_id, number, str(error))
        except Exception as error:
            log.exception("%s: slice %d met an unexpected error, and is tried again", batch_id, number)
            kind = type(error).__name__
            _explain(held, batch_id, number, f"{kind}: {first_line(error)} (more in the batch worker's log)")
        _sweep_in_turn(held, chain)


def look(queue: str) -> None:
    """Look at all batches of a queue: what an RQ job calls that a client put in line where nothing else was."""
    with _at_hand(queue) as (held, chain, url), faults_in_one_line(url):
        sweep(held, chain)


@contextmanager
def _at_hand(queue: str) -> Iterator[tuple[Queue, Chain, str]]:
    """The queue, the line of its slices, and the server's URL, in an RQ job."""
    job = rq.get_current_job()
    assert job is not None
    assert job.connection is not None
    with Server(None) as server:
        keys = keys_of(queue)
        held = Queue(connect(server.url, keys, OUTAGE_S), keys)
        try:
            yield held, Chain(job.connection, queue), server.url
        finally:
            held.close()


def _sweep_in_turn(queue: Queue, chain: Chain) -> None:
    """RQ's own worker does nothing but run jobs, so they look after the other batches."""
    try:
        if batches.may_sweep(queue):
            sweep(queue, chain)
    except redis.RedisError as error:
        log.warning("the batches cannot be looked at: %s", error)


def _explain(queue: Queue, batch_id: str, number: int, why: str) -> None:
    try:
        queue.run(batches.note(queue.keys, batch_id, number, why=why))
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
    began: float = field(default_factory=time.monotonic)

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
        if status in ENDED:
            self._tell(batch, folder)
            return None
        if (ended := folder.ended()) is not None:
            return self._close(batch, folder, ended)
        match status:
            case "validating":
                return self._validate(batch, folder)
            case "in_progress":
                return self._run(folder)
            case _:
                return self._end(batch, folder)

    def _validate(self, batch: Batch, folder: Folder) -> Status | None:
        def go_on(how_far: str) -> bool:
            return self._note(why=how_far) is not None and self._has_time()

        try:
            checked = validate(folder, go_on)
        except (Refused, RequestError) as error:
            folder.drop_work()
            fault = {"code": "invalid_input", "message": str(error), "line": None, "param": None}
            return self._advance("*", "failed", errors=json.dumps([fault]), **_telling(batch))
        if checked is None:
            return self._advance("*", None)
        # cancelled meanwhile, it stays so
        return self._advance("validating", "in_progress", failed=checked.bad, **_counted(checked))

    def _run(self, folder: Folder) -> Status | None:
        with opened(folder) as (outcomes, rows):

            def go_on(why_not: str) -> bool:
                status = self._note((outcomes.answered, outcomes.failed), why_not)
                return status == "in_progress" and self._has_time()

            all_done = run_rows(folder, self.queue, outcomes, rows, go_on)
            self._note((outcomes.answered, outcomes.failed))
        return self._advance("in_progress", "finalizing" if all_done else None)

    def _end(self, batch: Batch, folder: Folder) -> Status | None:
        if not batch.checked:  # cancelled before: its rows are counted first
            return self._validate(batch, folder)
        now = batches.show(self.queue, self.batch_id)
        if now is None:
            return None
        with opened(folder) as (outcomes, rows):

            def go_on() -> bool:
                return self._note((outcomes.answered, outcomes.failed)) is not None and self._has_time()

            stopped = now.ending == "completed" or stop_rows(
                folder, self.queue, outcomes, rows, now.ending, go_on
            )
            if not stopped or not finalise(folder, outcomes, rows, go_on):
                return self._advance("*", None)
            ended = Ended(status=now.ending, completed=outcomes.answered, failed=outcomes.failed)
        folder.end(ended)
        return self._close(batch, folder, ended)

    def _close(self, batch: Batch, folder: Folder, ended: Ended) -> Status | None:
        """Tell the server of a batch whose files are in their places."""
        folder.drop_work()
        counts = {"completed": ended.completed, "failed": ended.failed, **_counted(folder.checked())}
        return self._advance("*", ended.status, **counts, **_telling(batch))

    def _has_time(self) -> bool:
        longest_s = SHORTEST_S if self.chain.others_wait() else LONGEST_S
        return time.monotonic() - self.began < longest_s and not told_to_leave.is_set()

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

    def _note(self, done: tuple[int, int] | None = None, why: str = "") -> Status | None:
        return self.queue.run(batches.note(self.queue.keys, self.batch_id, self.number, done, why))

    def _advance(self, start: Start, to: Status | None, **fields: str | int) -> Status | None:
        call = batches.advance(self.queue.keys, self.batch_id, self.number, self.by, start, to, **fields)
        status = self.queue.run(call)
        if status is not None and status == to:
            log.info("%s: %s", self.batch_id, status)
        return status


def _counted(checked: Checked) -> dict[str, str | int]:
    """What the hash is told of a batch's input."""
    return {
        "checked": 1,
        "total": checked.total,
        "endpoint": checked.endpoint,
        "torn": json.dumps(checked.torn),
    }


def _telling(batch: Batch) -> dict[str, str]:
    """What the hash is told of the webhook when a batch ends."""
    return {"webhook": "due"} if batch.webhook == "wanted" else {}
