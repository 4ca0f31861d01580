"""Jobs that nobody waits for: of rows that were edited or taken out between two runs of the same command, and of runs
that others took the place of."""

from __future__ import annotations

from broker import calls
from broker.completions import NO_ENTRY
from broker.keys import keys_of
from broker.queue import Queue
from producer.bulk.inputs import Inputs
from producer.bulk.manifest import Manifest
from producer.bulk.requests import job_id_of

SCAN_AT_ONCE = 1000


def cancel_stale(queue: Queue, run: str, inputs: Inputs) -> int:
    """Cancel jobs of an earlier process of this run whose lines are no longer in the input; how many.

    Those that ended are left to the window, which forgets them; what is cancelled ends there too.

    Raises:
        redis.RedisError: the server could not be reached; the next run does it.
    """
    stale = jobs_of(queue, run)
    if stale:
        for line in inputs.rows():
            stale.discard(job_id_of(run, line.number, line.digest))
    answers = queue.run_all([calls.cancel(queue.keys, job_id) for job_id in stale])
    return sum(outcome in ("cancelled", "cancelling") for outcome, _ in answers)


def drop_superseded(queue: Queue, manifest: Manifest, *, own_queues: bool) -> None:
    """Cancel and forget the jobs of the runs whose place a run took. What runs at the moment expires once it ends.

    Args:
        own_queues: each run had a queue of its own, by its name.

    Raises:
        redis.RedisError: the server could not be reached; the next try does it.
    """
    for run in manifest.superseded:
        theirs = Queue(queue.client, keys_of(run)) if own_queues else queue
        jobs = list(jobs_of(theirs, run))
        answers = theirs.run_all([calls.cancel(theirs.keys, job_id) for job_id in jobs])
        ended = [
            (job_id, NO_ENTRY)
            for job_id, (outcome, _) in zip(jobs, answers, strict=True)
            if outcome != "cancelling"
        ]
        for first in range(0, len(ended), SCAN_AT_ONCE):
            theirs.run(calls.forget(theirs.keys, run, ended[first : first + SCAN_AT_ONCE]))
        theirs.client.delete(theirs.keys.done(run))


def jobs_of(queue: Queue, run: str) -> set[str]:
    """The ids of a run's jobs that the server has."""
    prefix = queue.keys.job(f"{run}.")  # names hold nothing that a pattern reads otherwise
    found = queue.client.scan_iter(f"{prefix}*", SCAN_AT_ONCE)
    return {f"{run}.{key.decode().removeprefix(prefix)}" for key in found}
