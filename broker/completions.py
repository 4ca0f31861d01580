"""The completions of one bulk run, read as they are announced.

done:<run>   {id: result, ...} {...} ...     an entry for jobs that ended together; read from the last one seen
forget                                       once the rows are durable elsewhere
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from broker import calls
from broker.connection import SOCKET_TIMEOUT_S
from broker.queue import Queue
from protocol import Result

NO_ENTRY = "0-1"
"""Stands for the announcement of a job that is forgotten although nobody read one: it was lost, or goes with its
stream. No server gives an entry this id."""
READ_AT_ONCE = 100
"""Entries at most, each of up to `broker.parts.AT_ONCE` jobs."""
FIRST_READ = 8
"""Entries of the first read, when nobody knows how large they are."""
READ_BYTES = 1 << 26
"""Of results read at once, by what the last ones took: an entry may have 64 MiB, and a hundred of them no room."""
LONGEST_BLOCK_S = SOCKET_TIMEOUT_S / 2
"""A longer wait on the server would count as a lost connection."""


class Completion(msgspec.Struct, frozen=True, gc=False):
    """One ended job."""

    entry: str
    id: str
    raw: bytes
    """The result as it is stored."""

    @property
    def result(self) -> Result:
        """The result, checked."""
        return Result.decode(self.raw)


class Completions:
    """Reads one run's completions; it owns the position in the run's stream."""

    def __init__(self, queue: Queue, run: str) -> None:
        self._queue = queue
        self._run = run
        self._after = "0"
        self._at_once = FIRST_READ
        self._unforgotten: dict[str, int] = {}
        """How many jobs of an entry are not forgotten yet: it is deleted with the last of them."""

    def read(self, block_s: float) -> list[Completion]:
        """The next completions, waiting at most `block_s` seconds for the first; empty if none came.

        Raises:
            redis.RedisError: the server could not be reached.
        """
        stream = self._queue.keys.done(self._run)
        block_ms = max(1, int(min(block_s, LONGEST_BLOCK_S) * 1000))
        reply: Any = self._queue.client.xread({stream: self._after}, count=self._at_once, block=block_ms)
        entries = _entries(reply)
        if not entries:
            return []
        found = [
            Completion(entry.decode(), job_id.decode(), raw)
            for entry, results in entries
            for job_id, raw in results.items()
        ]
        self._after = found[-1].entry
        an_entry = max(1, sum(len(one.raw) for one in found) // len(entries))
        self._at_once = min(2 * self._at_once, READ_AT_ONCE, max(1, READ_BYTES // an_entry))
        self._unforgotten |= Counter(one.entry for one in found)
        return found

    def rewind(self) -> None:
        """Read the stream from its beginning again: who lost it may number the next one from further back."""
        self._after = "0"

    def forget(self, completions: Sequence[Completion]) -> None:
        """Delete ended jobs whose rows are durable, and the entries whose jobs all are.

        Raises:
            redis.RedisError: the server could not be reached; forget them again.
        """
        if not completions:
            return
        told = Counter(completion.entry for completion in completions)
        left = {entry: self._unforgotten.get(entry, 0) - count for entry, count in told.items()}
        over = [entry for entry, count in left.items() if count <= 0]
        ended = zip_longest((completion.id for completion in completions), over, fillvalue="")
        self._queue.run(calls.forget(self._queue.keys, self._run, list(ended)))
        self._unforgotten |= left
        for entry in over:
            del self._unforgotten[entry]

    def end(self) -> None:
        """Delete the run's stream: nothing more will be announced on it."""
        self._queue.client.delete(self._queue.keys.done(self._run))


def _entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    # RESP3 answers a dict {stream: [entries]} (entries in a list of their own), RESP2 a list of pairs.
    if not reply:
        return []
    if isinstance(reply, dict):
        (batches,) = reply.values()
        return [entry for batch in batches for entry in batch]
    entries: list[tuple[bytes, dict[bytes, bytes]]] = reply[0][1]
    return entries
