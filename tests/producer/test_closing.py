"""A client that is closed under open calls, and the connections that one keeps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from broker.connection import connect
from broker.pools import KEPT
from millstream import AsyncClient, Client, Job
from protocol import ClientClosed
from tests.producer.fake_worker import FakeWorker
from tests.servers import RealServer

LATER = {
    "submit": lambda client: client.submit("x"),
    "submit_many": lambda client: client.submit_many([Job(id="a", prompt="x")]),
    "result": lambda client: client.job("a").result(),
    "cancel": lambda client: client.job("a").cancel(),
    "status": lambda client: client.status(),
    "pause": lambda client: client.pause(),
    "clear": lambda client: client.clear(),
    "limits": lambda client: client.limits(),
    "weights": lambda client: client.weights(),
    "dead": lambda client: client.dead.list(),
}


def connections(server: RealServer) -> int:
    with connect(server.url) as client:
        listed: Any = client.client_list()
        return len(listed) - 1


def falls_to(server: RealServer, most: int) -> None:
    """A server notices within moments that a connection was closed."""
    deadline = time.monotonic() + 10
    while (found := connections(server)) > most:
        assert time.monotonic() < deadline, f"{found} connections are left"
        time.sleep(0.02)


@pytest.mark.parametrize("call", ["result", "stream", "text_stream", "submit"])
def test_closing_ends_the_calls_of_other_threads(server: RealServer, call: str) -> None:
    before = connections(server)
    client = Client(server.url)
    job = client.submit("x")
    calls: dict[str, Callable[[], Any]] = {
        "result": job.result,
        "stream": lambda: list(job.stream()),
        "text_stream": lambda: list(job.text_stream()),
        "submit": lambda: client.submit("y", wait_s=60),
    }
    client.limits(max_entries=1)
    ends: list[Exception] = []

    def run() -> None:
        try:
            calls[call]()
        except Exception as error:
            ends.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(5)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)  # for some of them to be within their waits: where they are makes no difference
    client.close()
    for thread in threads:
        thread.join(10)
    assert [(type(end), str(end)) for end in ends] == [(ClientClosed, "this client is closed")] * 5
    client.close()
    falls_to(server, before)


def test_closing_ends_the_calls_of_other_tasks(server: RealServer) -> None:
    before = connections(server)

    async def run() -> list[Any]:
        async with AsyncClient(server.url) as client:
            job = await client.submit("x")
            await client.limits(max_entries=1)

            async def streamed() -> list[Any]:
                return [event async for event in job.stream()]

            waits = (job.result(), streamed(), client.submit("y", wait_s=60)) * 2
            waiting = asyncio.gather(*waits, return_exceptions=True)
            await asyncio.sleep(0.3)
        return await asyncio.wait_for(waiting, 10)

    ends = asyncio.run(run())
    assert [(type(end), str(end)) for end in ends] == [(ClientClosed, "this client is closed")] * 6
    falls_to(server, before)


@pytest.mark.parametrize("call", LATER)
def test_a_closed_client_calls_nobody(server: RealServer, call: str) -> None:
    before = connections(server)
    client = Client(server.url)
    stream = client.submit("x", id="a").stream
    client.close()
    with pytest.raises(ClientClosed, match="this client is closed"):
        LATER[call](client)
    with pytest.raises(ClientClosed):
        next(iter(stream()))

    async def run() -> None:
        other = AsyncClient(server.url)
        with pytest.raises(RuntimeError, match="not open"):
            await LATER[call](other)
        async with other:
            await other.status()
        with pytest.raises(ClientClosed, match="this client is closed"):
            await LATER[call](other)
        async with other:
            assert (await other.status()).waiting == 1

    asyncio.run(run())
    falls_to(server, before)


def test_a_peak_of_watchers_leaves_few_connections(server: RealServer) -> None:
    before = connections(server)
    watchers = 4 * KEPT
    with Client(server.url) as client:
        job = client.submit("one two three")
        texts: list[str] = []
        threads = [
            threading.Thread(target=lambda: texts.append("".join(job.text_stream()))) for _ in range(watchers)
        ]
        for thread in threads:
            thread.start()
        with FakeWorker(server.url):
            for thread in threads:
                thread.join(30)
        assert texts == ["one two three"] * watchers
        falls_to(server, before + KEPT)
        assert client.status().waiting == 0

    async def run() -> None:
        async with AsyncClient(server.url) as other:
            asked = await other.submit("one two three")

            async def text() -> str:
                return "".join([piece async for piece in asked.text_stream()])

            watching = [asyncio.create_task(text()) for _ in range(watchers)]
            with FakeWorker(server.url):
                assert await asyncio.gather(*watching) == ["one two three"] * watchers
            await asyncio.to_thread(falls_to, server, before + KEPT)
            assert (await other.status()).waiting == 0

    asyncio.run(run())
    falls_to(server, before)
