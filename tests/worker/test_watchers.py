"""Clients that watch workers: late, slow, cut off, killed or absent, each gets the whole text and changes nothing.

How a watcher repairs what it missed is shown in tests/broker/test_watch.py; here a worker streams.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker import calls
from broker.queue import Queue
from producer.async_client import AsyncClient
from producer.client import Client
from protocol import JobNotFound, TokenEvent
from tests.proxy import Proxy
from tests.servers import ValkeyServer
from tests.worker.harness import (
    ON_BOTH_SERVERS,
    Workers,
    ended,
    logged,
    nothing_left,
    queue_at,
    result,
    submit,
    until,
    words,
)

COUNT = 40
TEXT = words(COUNT)
IN_TIME_S = 2.0
"""Everybody has heard of the end this long after it (E11)."""
FOLLOW_HALF_WAY = """
import os, sys
from producer.client import Client
events = Client(sys.argv[1]).job("j").stream()
for _ in range(5):
    next(events)
print("half-way", flush=True)
os.kill(os.getpid(), 9)
"""


def listen(url: str, pause_s: float = 0.0) -> tuple[list[Any], float]:
    """Follow job j with the blocking client; all events, and when the last one came."""
    events = []
    with Client(url) as client:
        for event in client.job("j").stream():
            events.append(event)
            time.sleep(pause_s)  # a client that is slow
    return events, time.monotonic()


def listen_async(url: str, pause_s: float = 0.0) -> tuple[list[Any], float]:
    """As `listen`, with the client for asyncio."""

    async def run() -> list[Any]:
        events = []
        async with AsyncClient(url) as client:
            async for event in client.job("j").stream():
                events.append(event)
                await asyncio.sleep(pause_s)
        return events

    return asyncio.run(run()), time.monotonic()


LISTENERS: tuple[Callable[..., tuple[list[Any], float]], ...] = (listen, listen_async)


def assert_whole(events: list[Any]) -> None:
    assert [event.seq for event in events] == list(range(1, COUNT + 2)), "gap or repeat"
    assert "".join(event.text for event in events if isinstance(event, TokenEvent)) == TEXT
    assert [event.type for event in events if event.type != "token"] == ["done"]


@contextmanager
def subscriptions_cut(queue: Queue) -> Iterator[Callable[[], int]]:
    """The server cuts off every subscriber again and again; says how many it has."""
    done = threading.Event()
    cut = [0]

    def keep_cutting() -> None:
        client: Any = queue.client
        while not done.wait(0.1):
            cut[0] += client.execute_command("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")

    thread = threading.Thread(target=keep_cutting)
    thread.start()
    try:
        yield lambda: cut[0]
    finally:
        done.set()
        thread.join()


@ON_BOTH_SERVERS
@pytest.mark.parametrize(
    "is_cut",
    [
        pytest.param(False, id="undisturbed", marks=pytest.mark.long),
        pytest.param(True, id="cut off again and again"),
    ],
)
def test_e11_many_watchers_of_one_job(queue: Queue, workers: Workers, is_cut: bool) -> None:
    """From before the start, after 5 words, after 20, slow, killed half-way, and after the end."""
    workers.start(model="dry-run:words?delay=100ms").ready()
    found: list[Future[tuple[list[Any], float]]] = []
    with ThreadPoolExecutor(12) as pool:
        submit(queue, "j", TEXT)
        found += [pool.submit(follow, workers.url) for follow in LISTENERS]
        leaver = subprocess.Popen(
            [sys.executable, "-c", FOLLOW_HALF_WAY, workers.url], stdout=subprocess.PIPE, text=True
        )
        for seen in (5, 20):
            until(lambda seen=seen: logged(queue, "j") >= seen, f"{seen} words")  # type: ignore[misc]
            found += [pool.submit(follow, workers.url) for follow in LISTENERS]
        found.append(pool.submit(listen, workers.url, 0.03))
        if is_cut:
            with subscriptions_cut(queue) as cut:
                end_at = end_of(queue)
                assert cut() > 0
        else:
            end_at = end_of(queue)
        found += [pool.submit(follow, workers.url) for follow in LISTENERS]
        heard = [one.result(60) for one in found]
    out, _ = leaver.communicate(timeout=30)
    assert (out, leaver.returncode) == ("half-way\n", -9)
    for events, _ in heard:
        assert_whole(events)
    assert max(at for _, at in heard) - end_at < 10 * IN_TIME_S, "nobody misses the end again and again"
    assert result(queue, "j").text == TEXT
    nothing_left(queue)


def end_of(queue: Queue) -> float:
    until(lambda: queue.run(calls.look(queue.keys, "j")).result is not None, "the end")
    return time.monotonic()


@ON_BOTH_SERVERS
def test_e11_nobody_watches_and_then_it_has_expired(queue: Queue, workers: Workers) -> None:
    """That nobody hears a PUBLISH is no error. Afterwards it is served from the result, and then said to be gone."""
    workers.start(model="dry-run:words").ready()
    submit(queue, "j", TEXT)
    end_of(queue)
    queue.client.delete(queue.keys.log("j"))
    for follow in LISTENERS:
        events, _ = follow(workers.url)
        assert "".join(event.text for event in events if isinstance(event, TokenEvent)) == TEXT
        assert events[-1].type == "done"
    for key in (queue.keys.job("j"), queue.keys.result("j")):
        assert queue.client.pexpire(key, 1)
    until(lambda: not queue.client.exists(queue.keys.job("j"), queue.keys.result("j")), "expired")
    for follow in LISTENERS:
        began = time.monotonic()
        with pytest.raises(JobNotFound, match="j: not found"):
            follow(workers.url)
        assert time.monotonic() - began < 5.0


@pytest.mark.long
def test_a_slow_server_slows_the_engine_and_fills_no_memory(tmp_path: Path) -> None:
    """The model process stands still at its pipe while the parent waits for the server, and neither of them grows."""
    with ValkeyServer(aof=False) as server, Proxy(server.socket_path) as proxy, queue_at(server.url) as queue:
        slow = Workers(proxy.url, tmp_path)
        worker = slow.start(model="dry-run:words").ready()
        submit(queue, "j", words(300_000), max_tokens=300_000)
        until(lambda: logged(queue, "j") > 0, "it has begun")
        proxy.delay_s = 0.05
        model_process = worker.model_process()
        both = (model_process, psutil.Process(worker.process.pid))

        def busy_s() -> float:
            used = model_process.cpu_times()
            return used.user + used.system

        def stands_still() -> bool:
            before, seen = busy_s(), logged(queue, "j")
            until(lambda: logged(queue, "j") > seen, "the next event")
            return busy_s() == before

        until(stands_still, "the model process waits")
        before, at, seen = sum(one.memory_info().rss for one in both), busy_s(), logged(queue, "j")
        until(lambda: logged(queue, "j") >= seen + 20, "twenty more events")
        assert busy_s() - at < 0.1
        assert sum(one.memory_info().rss for one in both) - before < 2 << 20
        proxy.delay_s = 0.0
        queue.run(calls.cancel(queue.keys, "j"))
        stored = ended(queue, "j")
        assert stored.state == "cancelled"
        assert words(300_000).startswith(stored.text)
        slow.close()


@pytest.mark.long
@ON_BOTH_SERVERS
def test_e04_a_long_job_and_its_neighbours_stay_with_an_owner_that_lives(
    queue: Queue, workers: Workers
) -> None:
    """Eight steps of a second each under leases of 1.5 s; beside it 79 jobs run and 20 wait in the engine: a worker
    holds a quarter more than it has slots. An idle worker looks on.
    """
    model = "dry-run:words?delay=1s&slots=80"
    owner = workers.start("--lease", "1.5", model=model).ready()
    queue.run(calls.pause(queue.keys, True))
    submit(queue, "j", words(8))
    others = [f"held{number}" for number in range(99)]
    for name in others:
        submit(queue, name, words(2))
    queue.run(calls.pause(queue.keys, False))
    until(lambda: queue.run(calls.status(queue.keys)).running == 100, "all are held")

    def begun() -> tuple[int, int]:
        """How many of the others have told something, and how many steps `j` has; of one moment."""
        read = queue.client.pipeline()
        for name in ("j", *others):
            read.llen(queue.keys.log(name))
        steps, *told = read.execute()
        return sum(length > 0 for length in told), steps

    seen = [begun()]
    until(lambda: seen.append(begun()) or seen[-1][0] >= 79, "the slots are full")
    others_begun, steps = seen[-1]
    assert others_begun == 79 or steps >= 2, (
        "20 wait in the engine until those before them have had two steps"
    )
    workers.start("--lease", "1.5", model=model).ready()
    results = [ended(queue, name) for name in ("j", *others)]
    assert {one.attempt for one in results} == {1}
    assert len({one.worker for one in results}) == 1
    assert owner.log.count("lease lost") == 0
    nothing_left(queue)
