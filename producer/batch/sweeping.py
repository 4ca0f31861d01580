"""What keeps batches going: a look at all of them, now and then, by whoever works on them.

    no slice in line, none at work     its process was killed, or it had to stop: another slice, with the next number
    webhook due                        its time has come: a slice that tells it
    retention over                     folder and keys are deleted

Two that sweep at once do no harm: of two slices with one number the second is refused.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from broker import batches
from broker.batches import Batch
from broker.queue import Queue
from producer.batch.chain import Chain
from producer.batch.folder import Folder
from protocol import MillstreamError

log = logging.getLogger("millstream.batch")


def sweep(queue: Queue, chain: Chain) -> None:
    """Look at all batches of a queue.

    Raises:
        redis.RedisError: a server could not be reached.
    """
    now = batches.server_time(queue)
    for batch in batches.show_all(queue):
        if batch.has_ended and now >= batch.ended_at + batch.retention_s:
            Folder(Path(batch.folder)).delete()
            batches.forget(queue, batch.id)
            log.info("%s: its retention is over: deleted", batch.id)
        elif _wants_slice(batch, now) and not _is_at_work(batch) and not chain.has(batch.id, batch.slice):
            _put_another(queue, chain, batch)


def _wants_slice(batch: Batch, now: int) -> bool:
    return not batch.has_ended or (batch.webhook == "due" and now >= batch.webhook_at)


def _is_at_work(batch: Batch) -> bool:
    try:
        with Folder(Path(batch.folder)).locked() as free:
            return not free
    except (MillstreamError, OSError):  # seen by others, perhaps
        return False


def _put_another(queue: Queue, chain: Chain, batch: Batch) -> None:
    """The slice that had the number can tell the server nothing any more, should it live."""
    by = secrets.token_hex(8)
    call = batches.advance(queue.keys, batch.id, batch.slice, by, "*", None, note=batch.note)
    if queue.run(call) is not None:
        chain.put(batch.id, batch.slice + 1)
        log.info("%s: slice %d is lost: %d is in line", batch.id, batch.slice, batch.slice + 1)
