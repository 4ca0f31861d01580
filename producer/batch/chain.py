"""The RQ jobs of batches: a slice each, named by batch and number. JSON between processes, never pickle.

batch-worker (or `rq worker`)   slice 1 --> slice 2 --> slice 3 ...       each puts the next one in line
look                            a sweep: a batch without a slice in line or at work gets one
"""

from __future__ import annotations

import secrets

import redis
import rq
from rq.command import PUBSUB_CHANNEL_TEMPLATE
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from broker.connection import connect
from broker.finding import is_sharded
from broker.keys import keys_of
from producer.refusal import Refused

FAILURE_TTL_S = 24 * 3600
"""How long RQ keeps a slice whose process was killed."""
TIMEOUT_S = 3600
"""For a slice that hangs: each watches its own time, a minute."""
AGAIN = 3
"""How often RQ itself puts a slice in line again whose process is gone, which it sees after some minutes."""
WORK = "producer.batch.slices.work"
LOOK = "producer.batch.slices.look"


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
            timeout=TIMEOUT_S,
            result_ttl=0,
            failure_ttl=FAILURE_TTL_S,
            retry=rq.Retry(max=AGAIN),
        )

    def put_look(self) -> None:
        """Have whoever works on the batches look at all of them.

        Raises:
            redis.RedisError: RQ's server could not be reached.
        """
        self._line.enqueue_call(
            LOOK,
            args=(self._queue,),
            job_id=f"look-{secrets.token_hex(8)}",
            description="a look at all batches",
            timeout=TIMEOUT_S,
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

    def is_worked_on(self) -> bool:
        """Whether a `batch-worker` or an `rq worker` runs for the line now.

        RQ's list of workers keeps one that was killed for up to an hour. But each listens on a channel of its own for
        as long as it is connected.

        Raises:
            redis.RedisError: RQ's server could not be reached.
        """
        keys = rq.Worker.all_keys(queue=self._line)
        names = [key.removeprefix(rq.Worker.redis_worker_namespace_prefix) for key in keys]
        heard = self._line.connection.pubsub_numsub(*(PUBSUB_CHANNEL_TEMPLATE % name for name in names))
        return any(listeners for _, listeners in heard)

    def others_wait(self) -> bool:
        """Whether slices of other batches are in line."""
        return bool(self._line.count)


def _job_id(batch_id: str, number: int) -> str:
    return f"{batch_id}-{number}"
