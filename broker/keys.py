"""Every key and channel name, in one place.

One queue lives on one shard: all its keys share the hash tag `{queue}`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from protocol import ErrorCode, RequestError
from protocol.job import Name

GROUP = "workers"
"""The consumer group of every job stream."""
PERMANENT = ("meta", "workers", "weights", "dead", "done:*", "batches", "batch:*")
"""Keys, after a queue's base, that have no expiry and stand there without a job: the queue's own, dead letters until
they are purged, completions of a bulk run that keeps its results until the run ends, batches until their retention is
over. Every other key lives with a job that has not ended, or expires."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of one queue."""

    queue: str = "default"
    prefix: str = "ms"

    @property
    def base(self) -> str:
        """What every key of the queue starts with."""
        return f"{self.prefix}:{{{self.queue}}}:"

    @property
    def meta(self) -> str:
        """Hash: fingerprint, bounds, counts of entries and bytes, pick counter, virtual times."""
        return f"{self.base}meta"

    @property
    def workers(self) -> str:
        """Hash: a heartbeat a worker."""
        return f"{self.base}workers"

    @property
    def loading(self) -> str:
        """Hash: what a worker says while it loads its first model; expires."""
        return f"{self.base}loading"

    @property
    def leases(self) -> str:
        """Sorted set: job id by the server time (ms) at which its lease lapses."""
        return f"{self.base}leases"

    @property
    def delayed(self) -> str:
        """Sorted set: job id by the server time (ms) before which nobody may have it."""
        return f"{self.base}delayed"

    @property
    def deadlines(self) -> str:
        """Sorted set: job id by the server time (ms) at which its deadline is looked at."""
        return f"{self.base}deadlines"

    @property
    def weights(self) -> str:
        """Hash: a tenant's share of the picks beside one of weight 1."""
        return f"{self.base}weights"

    @property
    def control(self) -> str:
        """Channel: `wake` and `cancel:<id>`; hints only."""
        return f"{self.base}control"

    @property
    def dead(self) -> str:
        """Stream: dead letters."""
        return f"{self.base}dead"

    def jobs(self, priority: str, tenant: str) -> str:
        """Stream: entries of one priority and tenant."""
        return f"{self.base}jobs:{priority}:{tenant}"

    def tenants(self, priority: str) -> str:
        """Sorted set: tenants with undelivered work by virtual time."""
        return f"{self.base}tenants:{priority}"

    def job(self, job_id: str) -> str:
        """Hash: payload, state, attempt, crashes, worker, times."""
        return f"{self.base}job:{job_id}"

    def lease(self, worker: str) -> str:
        """String: the last lease reply of a worker, so that it can be repeated; expires."""
        return f"{self.base}lease:{worker}"

    def log(self, job_id: str) -> str:
        """List: the events of a job; index = seq - 1."""
        return f"{self.base}log:{job_id}"

    def tokens(self, job_id: str) -> str:
        """Channel: the same events, live."""
        return f"{self.base}tokens:{job_id}"

    def result(self, job_id: str) -> str:
        """String: the `Result`, as JSON, of a job that is of no bulk run."""
        return f"{self.base}result:{job_id}"

    def done(self, run: str) -> str:
        """Stream: completions of one bulk run, with the results."""
        return f"{self.base}done:{run}"

    @property
    def batches(self) -> str:
        """Sorted set: a batch's id by the server time (ms) at which it was submitted."""
        return f"{self.base}batches"

    @property
    def batches_swept(self) -> str:
        """String: there for half a minute after somebody looked at all batches."""
        return f"{self.base}batches-swept"

    def batch(self, batch_id: str) -> str:
        """Hash: status, counts, times and the number of the slice that may work on a batch."""
        return f"{self.base}batch:{batch_id}"


def keys_of(queue: str) -> Keys:
    """The keys of the queue of that name.

    Raises:
        RequestError: no queue can have that name.
    """
    try:
        return Keys(TypeAdapter(Name).validate_python(queue))
    except ValidationError:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"queue {queue!r}: use 1 to 100 letters, digits, '.', '_', '@' and '-'",
        ) from None
