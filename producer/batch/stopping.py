"""A batch is cancelled, or its window is over: answers are kept, every other row gets an error that says so."""

from __future__ import annotations

import time
from collections.abc import Callable

from broker import calls
from broker.completions import NO_ENTRY
from broker.queue import Queue
from producer.batch.folder import Folder
from producer.batch.outcomes import Outcomes
from producer.batch.rows import Rows
from producer.bulk import records
from producer.bulk.lines import BadRow, parse
from producer.bulk.records import Record
from producer.bulk.requests import position_of
from producer.bulk.stale import jobs_of

AT_ONCE = 1000
GRACE_S = 20.0
"""How long rows that run may take to hear of it: their workers look once a step."""
LOOK_EVERY_S = 0.1
WHY = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this row was answered"),
    "expired": ("batch_expired", "the batch's completion window was over before this row was answered"),
}


def stop_rows(
    folder: Folder, queue: Queue, outcomes: Outcomes, rows: Rows, ending: str, go_on: Callable[[], bool]
) -> bool:
    """Give every row an outcome, and leave nothing of the batch on the queue. Again: what is left of it.

    Args:
        go_on: called for each thousand rows; where it says no, the rest is for another slice (False).

    Raises:
        redis.RedisError: the server could not be reached; nothing is lost.
        MillstreamError: the disk is full; nothing is lost.
    """
    run = folder.manifest().run
    jobs = sorted(jobs_of(queue, run))
    for batch in _pieces(jobs):
        queue.run_all([calls.cancel(queue.keys, job_id) for job_id in batch])
    _keep_answers(queue, jobs, outcomes, rows)
    code, message = WHY[ending]
    number = outcomes.next_to_do(0)
    while number is not None:
        pending: list[Record] = []
        while number is not None and len(pending) < AT_ONCE:
            pending.append(_not_run(rows, number, code, message))
            number = outcomes.next_to_do(number + 1)
        outcomes.append(pending)
        if number is not None and not go_on():
            return False
    for batch in _pieces(jobs):
        queue.run(calls.forget(queue.keys, run, [(job_id, NO_ENTRY) for job_id in batch]))
    queue.client.delete(queue.keys.done(run))
    return True


def _keep_answers(queue: Queue, jobs: list[str], outcomes: Outcomes, rows: Rows) -> None:
    """Wait for what runs to end, and store what has an answer."""
    last = time.monotonic() + GRACE_S
    while jobs:
        running: list[str] = []
        for batch in _pieces(jobs):
            looks = queue.run_all([calls.look(queue.keys, job_id) for job_id in batch])
            answered: list[Record] = []
            for job_id, look in zip(batch, looks, strict=True):
                if look.state == "running":
                    running.append(job_id)
                elif look.result is not None and look.result.state != "cancelled":
                    row = parse(rows[rows.number(position_of(job_id))])
                    assert not isinstance(row, BadRow)
                    answered.append(records.of_result(row, look.result))
            outcomes.append(answered)
        if running and time.monotonic() > last:
            return  # their results expire; the rows count as not answered
        jobs = running
        if jobs:
            time.sleep(LOOK_EVERY_S)


def _not_run(rows: Rows, number: int, code: str, message: str) -> Record:
    row = parse(rows[number])
    assert not isinstance(row, BadRow)
    return records.of_bad_row(row.bad(code, message))


def _pieces(jobs: list[str]) -> list[list[str]]:
    return [jobs[first : first + AT_ONCE] for first in range(0, len(jobs), AT_ONCE)]
