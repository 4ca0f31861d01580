"""Whether the server may have lost what it had acknowledged.

run id         of the server's process: another one after a restart (up to a second of an append-only file that is
               synced every second) and after a failover (what had not reached the replica)
meta `epoch`   written by the first who finds none: gone after FLUSHALL, and with all data
"""

from __future__ import annotations

import uuid
from typing import Any

import redis

from broker.queue import Queue

FIELD = "epoch"


class Epoch:
    """Looks at the server of one queue now and then; it owns what was seen last."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._seen: tuple[str, bytes | None] | None = None

    def has_changed(self) -> bool:
        """Whether this is another server, or the same without its data, than at the last call; False at the first.

        Raises:
            redis.RedisError: the server could not be reached.
        """
        seen, self._seen = self._seen, (self._run_id(), self._mark())
        return seen is not None and seen != self._seen

    def _mark(self) -> bytes | None:
        client: Any = self._queue.client
        mark: bytes | None = client.hget(self._queue.keys.meta, FIELD)
        if mark is None:
            try:
                client.hsetnx(self._queue.keys.meta, FIELD, uuid.uuid4().hex)
            except redis.OutOfMemoryError:
                return None
            mark = client.hget(self._queue.keys.meta, FIELD)
        return mark

    def _run_id(self) -> str:
        ask: Any = self._queue.client.info
        try:
            return str(ask("server")["run_id"])
        except redis.exceptions.NoPermissionError:
            return ""  # this user may not look: the mark has to do
