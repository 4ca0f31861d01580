"""How often a call is tried, and how long a message may take."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff

from broker import calls
from broker.connection import connect, connect_async, unreachable, wait_until_ready
from broker.faults import ServerBusy, in_words, is_busy, passes
from broker.keys import Keys
from broker.patience import Patient, PatientAsync
from broker.queue import AsyncQueue, Queue
from broker.watch import follow, follow_async
from tests.broker import steps
from tests.broker.steps import end, put
from tests.proxy import Proxy
from tests.servers import RealServer, ValkeyServer

KEYS = Keys()


class Away(redis.ConnectionError):
    """Nobody answered."""


@pytest.mark.parametrize("patience_s", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_tries_within_tries_are_left_out(kind: str, patience_s: float) -> None:
    """redis-py connects within a call with the same retries: what it waits for is waited for once, not by each."""
    calls, connects = 0, 0

    def connect_in_vain() -> None:
        nonlocal connects
        connects += 1
        raise Away

    async def connect_in_vain_async() -> None:
        connect_in_vain()

    patient = Patient(patience_s, NoBackoff(), 3)
    patient_async = PatientAsync(patience_s, NoBackoff(), 3)

    def call() -> None:
        nonlocal calls
        calls += 1
        patient.call_with_retry(connect_in_vain, lambda _: None)

    async def call_async() -> None:
        nonlocal calls
        calls += 1
        await patient_async.call_with_retry(connect_in_vain_async, _nothing)

    run = {
        "sync": lambda: patient.call_with_retry(call, lambda _: None),
        "asyncio": lambda: asyncio.run(patient_async.call_with_retry(call_async, _nothing)),
    }
    with pytest.raises(Away):
        run[kind]()
    assert calls == connects > 3
    assert calls == 4 or patience_s


async def _nothing(_: Exception) -> None: ...


BUSY_S = 1.5
"""For how long a script holds up the server: longer than redis-py's few tries last."""


@contextmanager
def busy(server: RealServer) -> Iterator[None]:
    """A server that a script holds up for a while, so that it says BUSY to all others."""
    with redis.Redis.from_url(server.url) as runs, redis.Redis.from_url(server.url) as asks:
        runs.config_set("busy-reply-threshold", 1)
        thread = threading.Thread(target=_run_until_killed, args=[runs])
        thread.start()
        timer = threading.Timer(BUSY_S, lambda: asks.execute_command("SCRIPT", "KILL"))
        try:
            while not _says_busy(asks):
                pass
            timer.start()
            yield
        finally:
            timer.join()
            thread.join()


def _run_until_killed(runs: redis.Redis) -> None:
    with suppress(redis.ResponseError):
        runs.eval("while true do end", 0)


def _says_busy(asks: redis.Redis) -> bool:
    try:
        asks.get("k")
    except redis.ResponseError as error:
        return is_busy(error)
    return False


def _one(queue: Queue) -> object:
    return queue.run(calls.status(queue.keys)).waiting


def _many(queue: Queue) -> object:
    return len(queue.run_all([calls.status(queue.keys), calls.status(queue.keys)]))


def _pipeline_that_raises(queue: Queue) -> object:
    with queue.client.pipeline(transaction=False) as pipe:
        pipe.get("a").get("b")
        return pipe.execute()


def _followed(queue: Queue) -> object:
    return [event.type for event in follow(queue, "over")]


def _made_ready(queue: Queue) -> object:
    pool: Any = queue.client.connection_pool
    wait_until_ready(f"unix://{pool.connection_kwargs['path']}", 10.0)
    return "ready"


@pytest.mark.parametrize("connected", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("act", "answer"),
    [
        (_one, 0),
        pytest.param(_many, 2, marks=pytest.mark.long),
        (_pipeline_that_raises, [None, None]),
        (_followed, ["done"]),
        pytest.param(_made_ready, "ready", marks=pytest.mark.long),
    ],
)
def test_a_script_that_holds_up_the_server_is_ridden_out(
    fresh_server: RealServer, act: Callable[[Queue], object], answer: object, connected: bool
) -> None:
    queue = Queue(connect(fresh_server.url, KEYS, 10.0), KEYS)
    put(queue, "over")
    end(queue, steps.Worker(queue).lease_one())
    if not connected:
        queue.client.connection_pool.disconnect()
    with busy(fresh_server):
        assert act(queue) == answer
    queue.close()


def test_a_script_that_holds_up_the_server_is_ridden_out_by_asyncio(fresh_server: RealServer) -> None:
    async def story() -> None:
        queue = AsyncQueue(connect_async(fresh_server.url, KEYS, 10.0), KEYS)
        await queue.run(calls.submit(KEYS, steps.job("a")))
        await queue.run(calls.cancel(KEYS, "a"))
        with busy(fresh_server):
            one, many, events = await asyncio.gather(
                queue.run(calls.status(KEYS)), queue.run_all([calls.status(KEYS)] * 2), followed(queue)
            )
            assert (one.waiting, len(many), events) == (0, 2, ["cancelled"])
        await queue.close()

    async def followed(queue: AsyncQueue) -> list[str]:
        return [event.type async for event in follow_async(queue, "a")]

    asyncio.run(story())


def test_a_script_that_never_ends_is_told_as_such(fresh_server: RealServer) -> None:
    queue = Queue(connect(fresh_server.url, KEYS), KEYS)
    with busy(fresh_server):
        with pytest.raises(ServerBusy) as raised:
            _many(queue)
        assert passes(raised.value)
        assert in_words(raised.value)[0] == "it takes no calls"
        assert "a script holds it up" in str(unreachable(fresh_server.url, raised.value))
    queue.close()


@pytest.mark.long
@pytest.mark.parametrize("way", ["there", "back"])
def test_a_message_may_take_its_time_while_it_moves(way: str) -> None:
    """Four megabytes over a way that carries a piece every 20 ms: in all longer than a reply may be silent."""
    value = b"x" * (1 << 22)

    async def set_and_get(url: str) -> bool:
        async with connect_async(url) as client:
            await client.set("k", value)
            return bool(await client.get("k") == value)

    with ValkeyServer(aof=False) as server, Proxy(server.socket_path) as proxy:
        if way == "there":
            proxy.request_delay_s = 0.02
        else:
            proxy.delay_s = 0.02
        began = time.monotonic()
        assert asyncio.run(set_and_get(f"{proxy.url}?socket_timeout=1"))
        assert time.monotonic() - began > 1.1, "it was no slow way"
