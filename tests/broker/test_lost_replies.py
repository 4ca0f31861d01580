"""The reply of every script is lost once, after the server has run it: the caller and the server are none the worse.

undisturbed   prepare --> call ----------------------> outcome, state
disturbed     prepare --> call --> (cut) --> again --> outcome, state      both equal
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import broker
from broker import calls
from broker.connection import connect, connect_async
from broker.keys import Keys
from broker.queue import AsyncQueue, Queue
from broker.script import SHARED, Call
from tests.broker.cases import CASES, Case, leased
from tests.broker.seen import seen, without_times
from tests.broker.steps import finish_call, tokens
from tests.proxy import Proxy
from tests.servers import RealServer

KEYS = Keys()
SCRIPTS = sorted(
    path.stem for path in (Path(broker.__file__).parent / "lua").glob("*.lua") if path.stem not in SHARED
)


def test_every_script_has_its_reply_lost() -> None:
    assert sorted({case.script for case in CASES}) == SCRIPTS


@pytest.fixture
def proxy(server: RealServer) -> Iterator[Proxy]:
    with Proxy(server.socket_path) as running:
        yield running


@pytest.fixture
def caller(server: RealServer, proxy: Proxy) -> Callable[[Call[Any]], Any]:
    """Runs a call through the proxy: a blocking caller on one kind of server, one of asyncio on the other."""

    async def run_async(call: Call[Any]) -> Any:
        queue = AsyncQueue(connect_async(proxy.url), KEYS)
        try:
            return await queue.run(call)
        finally:
            await queue.close()

    def run(call: Call[Any]) -> Any:
        queue = Queue(connect(proxy.url), KEYS)
        try:
            return queue.run(call)
        finally:
            queue.close()

    return run if server.kind == "valkey" else lambda call: asyncio.run(run_async(call))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.script}, {case.what}")
def test_a_lost_reply_changes_nothing(
    queue: Queue, proxy: Proxy, caller: Callable[[Call[Any]], Any], case: Case
) -> None:
    def disturbed(call: Call[Any]) -> Any:
        proxy.lose_reply_to(call.script.sha.encode())
        return caller(call)

    undisturbed = seen(queue, case, queue.run)
    after = seen(queue, case, disturbed)
    assert proxy.lost == 1
    expected = undisturbed.outcome if case.told is None else without_times(case.told)
    assert after.outcome == expected
    assert after.heard == undisturbed.heard
    assert after.state == undisturbed.state


def test_the_reply_of_a_script_that_the_server_did_not_know(
    queue: Queue, proxy: Proxy, caller: Callable[[Call[Any]], Any]
) -> None:
    """Lost is the reply of the run that brought the source along."""
    client: Any = queue.client
    lease = leased(queue)
    client.script_flush()
    proxy.lose_reply_to(b"$4\r\nEVAL\r\n")
    assert caller(calls.publish(KEYS, "w1", "a", 1, 3, tokens(lease, 3, "z"))) == calls.Published("ok", 3)
    assert proxy.lost == 1


def test_replies_of_a_pipeline(queue: Queue, proxy: Proxy) -> None:
    """All of a pipeline's calls have run, and all run again."""
    lease = leased(queue)
    with connect(proxy.url) as client:
        says = [calls.publish(KEYS, "w1", "a", 1, seq, tokens(lease, seq, "z")) for seq in (3, 4)]
        many = [*says, finish_call(KEYS, lease, 4, "xyzz")]
        for call in many:
            queue.client.script_load(call.script.source)
        proxy.lose_reply_to(many[-1].script.sha.encode())
        answers = Queue(client, KEYS).run_all(many)
    assert proxy.lost == 1
    assert answers[-1] == "ok"
    assert queue.run(calls.look(KEYS, "a")).state == "succeeded"
    assert queue.client.llen(KEYS.log("a")) == 5
