"""Jobs of rows that were edited or taken out between two runs of the same command: nobody waits for them."""

from __future__ import annotations

from broker import calls
from broker.queue import Queue
from producer.bulk.inputs import Inputs

SCAN_AT_ONCE = 1000


def cancel_stale(queue: Queue, run: str, inputs: Inputs) -> int:
    """Cancel jobs of an earlier process of this run whose lines are no longer in the input; how many.

    Ids are made of run, position and digest (`Requests.job`). Those that ended are left to the window, which forgets
    them; what is cancelled ends there too.

    Raises:
        redis.RedisError: the server could not be reached; the next run does it.
    """
    prefix = queue.keys.job(f"{run}.")
    found = queue.client.scan_iter(
        f"{prefix}*", SCAN_AT_ONCE
    )  # names hold nothing that a pattern reads otherwise
    stale = {f"{run}.{key.decode().removeprefix(prefix)}" for key in found}
    if stale:
        for line in inputs.rows():
            stale.discard(f"{run}.{line.number}.{line.digest}")
    answers = queue.run_all([calls.cancel(queue.keys, job_id) for job_id in stale])
    return sum(outcome in ("cancelled", "cancelling") for outcome, _ in answers)
