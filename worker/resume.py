"""What earlier attempts of a reply's jobs have logged: the next one goes on from there.

    logs          j1: 700 events     j2: 2,500 events             j3: 10 events
    slices        700                1,024     1,024     452      10
    round trips   1                  2         3         4        4

Between two of them the worker renews its leases, these among them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from broker.parts import in_parts
from protocol import ErrorCode, JobError
from worker.held import Held, Stop
from worker.link import Link

log = logging.getLogger("millstream.worker")

EVENTS_AT_ONCE = 1024
"""Read in one round trip: they take the worker some 10 ms, in which it does nothing else."""


class _Slice(NamedTuple):
    """Of a log, from index `first` on."""

    held: Held
    first: int
    length: int


async def read_logs(link: Link, holding: Iterable[Held]) -> None:
    """Have each job go on after what is logged of it. A job whose log cannot be read is to be stopped, as dead.

    Waits for a server that is away, however long it takes.

    Raises:
        redis.RedisError: the server refuses.
    """
    size_in_events = attrgetter("length")
    for part in in_parts(_slices(holding), size_in_events, most_bytes=EVENTS_AT_ONCE):
        logs = await link.insist(partial(_read, link, part))
        for one, events in zip(part, logs, strict=True):
            _take_in(one.held, events)


def _slices(holding: Iterable[Held]) -> Iterator[_Slice]:
    for held in [held for held in holding if held.lease.logged]:
        log.info(
            "job %s attempt %d: goes on after %d logged events", held.id, held.attempt, held.lease.logged
        )
        for first in range(0, held.lease.logged, EVENTS_AT_ONCE):
            yield _Slice(held, first, min(EVENTS_AT_ONCE, held.lease.logged - first))


async def _read(link: Link, slices: Sequence[_Slice]) -> list[list[bytes]]:
    client: Any = link.queue.client
    async with client.pipeline(transaction=False) as pipe:
        for one in slices:
            pipe.lrange(link.keys.log(one.held.id), one.first, one.first + one.length - 1)
        logs: list[list[bytes]] = await pipe.execute()
    return logs


def _take_in(held: Held, events: Sequence[bytes]) -> None:
    if held.stop is not None:
        return
    try:
        held.go_on_after(events)
    except ValueError as error:
        (why, *_) = str(error).splitlines()
        message = f"its log cannot be read, somebody changed it by hand or another version wrote it: {why}"
        log.error("job %s attempt %d: %s", held.id, held.attempt, message)
        held.stop = Stop("dead", JobError(code=ErrorCode.SPOILT_JOB, message=message))
