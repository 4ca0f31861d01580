"""A server whose memory is full refuses a script's first write: nothing is done by halves, and nobody is told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import redis

from broker.connection import connect
from broker.keys import Keys
from broker.queue import Queue
from broker.script import Call
from tests.broker.cases import CASES
from tests.broker.seen import seen, without_times
from tests.broker.steps import snapshot
from tests.servers import RealServer

NEVER_REFUSED = {"status", "look", "dead_list", "dead_show", "dead_purge", "forget", "leave"}
"""Scripts that only read, or give memory back."""


def test_what_is_refused_is_neither_done_nor_told(fresh_server: RealServer) -> None:
    """Each call meets full memory, and is made once more when there is room: as if it had been made then alone.

    Nothing is leased then, be it lapsed, due or overdue: its owner's renewals are refused like that.
    """
    refused, taken = set(), []
    with closing(Queue(connect(fresh_server.url), Keys())) as queue:
        for case in CASES:
            undisturbed = seen(queue, case, queue.run)
            refusals: list[str] = []
            after = seen(queue, case, at_first_full(queue, refusals))
            refused.update(refusals)
            if not refusals and case.script in ("lease", "heartbeat"):
                taken.append(case.what)
            is_again = case.told is not None and not refusals
            where = f"{case.script}, {case.what}"
            assert after.outcome == (without_times(case.told) if is_again else undisturbed.outcome), where
            assert after.heard == undisturbed.heard, where
            assert after.state == undisturbed.state, where
        queue.client.flushall()
    assert not taken
    assert refused == {case.script for case in CASES} - NEVER_REFUSED


def at_first_full(queue: Queue, refusals: list[str]) -> Callable[[Call[Any]], Any]:
    """Runs a call while memory is full and, whatever comes of that, once more with room."""

    def run(call: Call[Any]) -> Any:
        before = snapshot(queue)
        queue.client.config_set("maxmemory", 1)
        try:
            queue.run(call)
        except redis.OutOfMemoryError:
            assert snapshot(queue) == before, f"{call.script.name} was refused, and has done something"
            refusals.append(call.script.name)
        finally:
            queue.client.config_set("maxmemory", 0)
        return queue.run(call)

    return run
