"""`millstream batch-worker`: RQ's worker for the slices of a queue's batches, and the sweep beside it. No model."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import redis
import rq
from rq.serializers import JSONSerializer

from broker.batches import SWEEP_EVERY_S
from broker.connection import connect, wait_until_ready
from broker.keys import keys_of
from broker.queue import Queue
from producer.batch.chain import Chain, rq_client, rq_queue_name
from producer.batch.slices import told_to_leave
from producer.batch.sweeping import sweep
from producer.reach import OUTAGE_S, Server

SERVER_S = 30.0
"""How long a server may take to come up at the start."""
log = logging.getLogger("millstream.batch")


class SliceWorker(rq.SimpleWorker):  # type: ignore[misc]  # rq is not checked
    """Runs slices in this process: they start in no time, and hold nothing that a fork would have to keep away."""

    def request_stop(self, signum: int, frame: Any) -> None:
        """The slice at work ends early, and the next one is another worker's."""
        told_to_leave.set()
        super().request_stop(signum, frame)


def serve(name: str, redis_url: str | None, rq_url: str | None, *, burst: bool) -> None:
    """Work until told to stop; `burst`: until no slice is in line.

    Raises:
        Refused: RQ's server is a Cluster.
        BrokerUnreachable: a server cannot be reached.
    """
    keys = keys_of(name)
    with Server(redis_url) as server:
        wait_until_ready(server.url, SERVER_S, keys)
        os.environ["REDIS_URL"] = server.url  # where slices look, as under `rq worker`
        slices = rq_client(rq_url or server.url, name)
        queue = Queue(connect(server.url, keys, OUTAGE_S), keys)
        sweeper = Sweeper(queue, Chain(slices, name))
        sweeper.sweep()
        sweeper.start()
        try:
            line = rq.Queue(rq_queue_name(name), connection=slices, serializer=JSONSerializer)
            worker = SliceWorker([line], connection=slices, serializer=JSONSerializer)
            log.info("working on the batches of queue %s", name)
            worker.work(burst=burst, logging_level="WARNING")
        finally:
            sweeper.stop()
            queue.close()


class Sweeper(threading.Thread):
    """Sweeps every half minute whoever else does, also while a slice takes longer."""

    def __init__(self, queue: Queue, chain: Chain) -> None:
        super().__init__(name="sweeper", daemon=True)
        self._queue = queue
        self._chain = chain
        self._over = threading.Event()

    def run(self) -> None:
        """Sweep until `stop`."""
        while not self._over.wait(SWEEP_EVERY_S):
            self.sweep()

    def sweep(self) -> None:
        """Sweep once; whatever it meets, such as a server that is away, it is tried again the next time."""
        try:
            sweep(self._queue, self._chain)
        except redis.RedisError as error:
            log.warning("the batches cannot be looked at: %s", error)
        except Exception:
            log.exception("the batches cannot be looked at")

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self.join()
