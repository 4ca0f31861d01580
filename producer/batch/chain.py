"""The RQ jobs of batches: a slice each, named by batch and number. JSON between processes, never pickle.

batch-worker (or `rq worker`)   slice 1 --> slice 2 --> slice 3 ...       each puts the next one in line
sweep                           a batch without a slice in line or at work gets one
"""

from __future__ import annotations

import redis
import rq
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from broker.connection import connect
from broker.finding import is_sharded
from broker.keys import keys_of
from producer.refusal import Refused

FAILURE_TTL_S = 24 * 3600
"""How long RQ keeps a slice whose process was killed."""
UNBOUNDED = -1
"""A slice watches its own time; the last one writes the whole output, however large that is."""
WORK = "producer.batch.slices.work"


def rq_client(url: str, queue: str) -> redis.Redis:
    """A client for RQ.

    Raises:
        Refused: the server is a Cluster, which RQ does not serve.
        BrokerUnreachable: the URL is none.
    """
    client = connect(url, keys_of(queue))
    if is_sharded(client):
        raise Refused("RQ does not serve a Redis Cluster: name another server for its jobs with --rq-url")
    return client


def rq_queue_name(queue: str) -> str:
    """The RQ queue that holds the slices of the batches of a queue."""
    return f"millstream-batch-{queue}"


class Chain:
    """The slices of a queue's batches that are in line."""

    def __init__(self, client: redis.Redis, queue: str) -> None:
        self._queue = queue
        self._line = rq.Queue(rq_queue_name(queue), connection=client, serializer=JSONSerializer)

    def put(self, batch_id: str, number: int) -> None:
        """Put a slice in line.

        Raises:
            redis.RedisError: RQ's server could not be reached.
        """
        self._line.enqueue_call(
            WORK,
            args=(self._queue, batch_id, number),
            job_id=_job_id(batch_id, number),
            description=f"slice {number} of {batch_id}",
            timeout=UNBOUNDED,
            result_ttl=0,
            failure_ttl=FAILURE_TTL_S,
        )

    def has(self, batch_id: str, number: int) -> bool:
        """Whether a slice is in line."""
        job_id = _job_id(batch_id, number)
        try:
            job = Job.fetch(job_id, connection=self._line.connection, serializer=JSONSerializer)
        except NoSuchJobError:
            return False
        return job.get_status() == JobStatus.QUEUED and self._line.get_job_position(job_id) is not None

    def others_wait(self) -> bool:
        """Whether slices of other batches are in line."""
        return bool(self._line.count)


def _job_id(batch_id: str, number: int) -> str:
    return f"{batch_id}-{number}"
