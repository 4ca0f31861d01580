"""Running calls: one and many, sync and asyncio, on servers that forget scripts and connections that lose replies."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.connection

from broker import calls
from broker.calls import Call
from broker.connection import connect, connect_async
from broker.dead_letters import dead_requeue
from broker.keys import Keys
from broker.queue import AsyncQueue, Queue
from tests.broker.steps import (
    LONG_MS,
    MODEL,
    Worker,
    assert_drained,
    assert_ended_once,
    counts,
    events_of,
    finish_call,
    job,
    put,
    tokens,
)
from tests.servers import RealServer

KEYS = Keys()


class Runner:
    """Runs calls as one kind of caller does, so that a test can be told for both."""

    def __init__(self, url: str, kind: str) -> None:
        self._url = url
        self._kind = kind

    def run(self, call: Call[Any]) -> Any:
        return self._with_queue(lambda queue: queue.run(call))

    def run_all(self, many: Sequence[Call[Any]]) -> Any:
        return self._with_queue(lambda queue: queue.run_all(many))

    def _with_queue(self, use: Callable[[Any], Any]) -> Any:
        if self._kind == "sync":
            queue = Queue(connect(self._url), KEYS)
            try:
                return use(queue)
            finally:
                queue.close()

        async def use_async() -> Any:
            queue = AsyncQueue(connect_async(self._url), KEYS)
            try:
                return await use(queue)
            finally:
                await queue.close()

        return asyncio.run(use_async())


@pytest.fixture(params=["sync", "asyncio"])
def runner(request: pytest.FixtureRequest, server: RealServer) -> Runner:
    return Runner(server.url, request.param)


def flush_scripts(queue: Queue) -> None:
    client: Any = queue.client
    client.script_flush()


def whole_way(lease: calls.Lease) -> list[Call[Any]]:
    """Three publishes that build on each other, and the end."""
    says = [
        calls.publish(KEYS, lease.worker, lease.id, lease.attempt, seq, tokens(lease, seq, text))
        for seq, text in enumerate("abc", start=1)
    ]
    return [*says, finish_call(KEYS, lease, 3, "abc")]


def test_many_calls_in_one_trip_are_answered_in_order(queue: Queue, runner: Runner) -> None:
    put(queue, "a", "b")
    first, second = Worker(queue).lease(2)
    answers = runner.run_all([*whole_way(first), *whole_way(second)])
    assert [answer if isinstance(answer, str) else answer.logged for answer in answers] == [1, 2, 3, "ok"] * 2
    assert runner.run_all([]) == []


def test_a_forgotten_script_is_given_again(queue: Queue, runner: Runner) -> None:
    flush_scripts(queue)
    assert runner.run(calls.submit(KEYS, job("a"))).outcome == "queued"
    lease = Worker(queue).lease_one()
    flush_scripts(queue)
    assert runner.run_all(whole_way(lease))[-1] == "ok"
    flush_scripts(queue)
    assert runner.run(calls.look(KEYS, "a")).state == "succeeded"
    assert_ended_once(queue, "a")


def test_a_script_forgotten_in_the_middle_of_many(queue: Queue, runner: Runner) -> None:
    """The server knows `finish` and not `publish`: the end comes too early, and once more in its place."""
    put(queue, "a")
    lease = Worker(queue).lease_one()
    flush_scripts(queue)
    queue.client.script_load(whole_way(lease)[-1].script.source)
    assert runner.run_all(whole_way(lease))[-1] == "ok"
    assert_ended_once(queue, "a")
    assert_drained(queue)


@contextmanager
def flushing_all_the_time(url: str) -> Iterator[None]:
    done = threading.Event()

    def flush() -> None:
        client: Any = connect(url)
        while not done.is_set():
            client.script_flush()
        client.close()

    thread = threading.Thread(target=flush)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_scripts_forgotten_all_the_time(queue: Queue, runner: Runner, server: RealServer) -> None:
    names = [f"j{n}" for n in range(8)]
    with flushing_all_the_time(server.url):
        runner.run_all([calls.submit(KEYS, job(name)) for name in names])
        leases = runner.run(calls.lease(KEYS, "w1", 1, 8, LONG_MS)).leases
        for lease in leases:
            assert runner.run_all(whole_way(lease))[-1] == "ok"
    assert {lease.id for lease in leases} == set(names)
    for name in names:
        assert assert_ended_once(queue, name).attempt == 1
    assert_drained(queue)


def test_a_call_that_the_server_refuses_raises_and_the_others_have_run(queue: Queue, runner: Runner) -> None:
    refused = dead_requeue(KEYS, "the name of no letter", job("c"))
    many: list[Call[Any]] = [calls.submit(KEYS, job("a")), refused, calls.submit(KEYS, job("b"))]
    with pytest.raises(redis.ResponseError, match="Invalid stream ID"):
        runner.run_all(many)
    with pytest.raises(redis.ResponseError, match="Invalid stream ID"):
        runner.run(many[1])
    assert counts(queue)[0] == 2


def test_after_a_restart_everything_goes_on(fresh_server: RealServer) -> None:
    queue = Queue(connect(fresh_server.url), KEYS)
    put(queue, "a", "b")
    lease = Worker(queue).lease_one()
    queue.client.config_set("appendfsync", "always")
    queue.run_all(whole_way(lease)[:2])
    fresh_server.restart()
    assert queue.run_all(whole_way(lease))[-1] == "ok"
    assert_ended_once(queue, "a")
    assert Worker(queue, "w2").lease_one().id == "b"
    queue.close()


# -- replies that are lost ---------------------------------------------------------------------------------------


@pytest.fixture
def every_first_reply_lost(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Of each script run the first reply is lost on its way, as by a cut connection; returns how many were."""
    lost: list[str] = []
    pending: dict[int, bytes] = {}
    send = redis.connection.AbstractConnection.send_packed_command
    read = redis.connection.AbstractConnection.read_response

    def send_noted(self: Any, command: Any, check_health: bool = True) -> Any:
        pending[id(self)] = b"".join([command] if isinstance(command, bytes) else command)
        return send(self, command, check_health)

    def read_or_lose(self: Any, *args: Any, **options: Any) -> Any:
        reply = read(self, *args, **options)
        command = pending.pop(id(self), b"")
        if b"EVAL" in command and command.hex() not in lost:
            lost.append(command.hex())
            self.disconnect()
            raise redis.ConnectionError("the connection was cut")
        return reply

    monkeypatch.setattr(redis.connection.AbstractConnection, "send_packed_command", send_noted)
    monkeypatch.setattr(redis.connection.AbstractConnection, "read_response", read_or_lose)
    return lambda: len(lost)


def test_each_reply_lost_once(queue: Queue, every_first_reply_lost: Callable[[], int]) -> None:
    """redis-py repeats the call, without a word."""
    names = ["a", "b", "c"]
    answers = [queue.run(calls.submit(KEYS, job(name))) for name in names]
    assert {(answer.outcome, answer.state) for answer in answers} == {("same", "queued")}
    worker = Worker(queue)
    leases = worker.lease(2) + worker.lease(2)
    assert [(lease.id, lease.attempt) for lease in leases] == [(name, 1) for name in names]
    before = every_first_reply_lost()
    for lease in leases:
        for call in whole_way(lease):
            assert queue.run(call) in ("ok", calls.Published("ok", len(events_of(queue, lease.id))))
    assert every_first_reply_lost() - before == 12
    for name in names:
        assert_ended_once(queue, name)
    assert_drained(queue)


def test_the_reply_of_many_calls_lost(queue: Queue, every_first_reply_lost: Callable[[], int]) -> None:
    for answer in queue.run_all([calls.submit(KEYS, job(name)) for name in "ab"]):
        assert answer.outcome == "same"
    for lease in Worker(queue).lease(2):
        assert queue.run_all(whole_way(lease))[-1] == "ok"
        assert_ended_once(queue, lease.id)
    assert every_first_reply_lost() >= 4
    assert_drained(queue)


# -- clocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift_s", [-3600.0, 3600.0])
def test_a_wrong_clock_neither_steals_nor_expires(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, shift_s: float
) -> None:
    put(queue, "a", result_ttl_s=30)
    lease = Worker(queue).lease_one(lease_ms=5000)
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + shift_s)
    other = Worker(queue, "w2")
    assert other.lease() == []
    assert queue.run(calls.renew(KEYS, "w1", 5000, [("a", 1)])) == ["held"]
    queue.run(calls.register(KEYS, "w2", MODEL))
    (beat,) = queue.run(calls.status(KEYS)).workers
    assert beat.alive
    assert queue.run_all(whole_way(lease))[-1] == "ok"
    client: Any = queue.client
    assert 25_000 < client.pttl(KEYS.result("a")) <= 30_000
