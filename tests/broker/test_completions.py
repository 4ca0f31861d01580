"""The completions of a bulk run, for clients of either protocol."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from broker import calls, completions
from broker.calls import Ending, Lease
from broker.completions import LONGEST_BLOCK_S, READ_AT_ONCE, Completion, Completions
from broker.connection import SOCKET_TIMEOUT_S
from broker.keys import Keys
from broker.queue import Queue
from protocol import Choice, Result
from tests.broker.steps import Worker, assert_drained, end, key_names, put, told
from tests.servers import RealServer

KEYS = Keys()


@pytest.fixture(params=[2, 3])
def queue(request: pytest.FixtureRequest, server: RealServer) -> Iterator[Queue]:
    client = redis.Redis.from_url(server.url, protocol=request.param, socket_timeout=SOCKET_TIMEOUT_S)
    yield Queue(client, KEYS)
    client.close()


def run_all(queue: Queue, *ids: str, **fields: Any) -> None:
    put(queue, *ids, run="r", **fields)
    for lease in Worker(queue, f"w-{ids[0]}").lease(len(ids)):
        assert end(queue, lease, text=f"text of {lease.id}") == "ok"


def run_together(queue: Queue, *ids: str) -> None:
    """Jobs that one script ends, so that one entry tells of them."""
    put(queue, *ids, run="r")
    worker = f"w-{ids[0]}"
    endings = [
        Ending(lease.id, lease.attempt, "succeeded", stored(lease), 0, [])
        for lease in Worker(queue, worker).lease(len(ids))
    ]
    assert queue.run(calls.finish_all(KEYS, worker, endings)) == ["ok"] * len(ids)
    assert len(told(queue)) == 1


def stored(lease: Lease) -> bytes:
    choice = Choice(text=f"text of {lease.id}", token_ids=[1])
    return Result(id=lease.id, state="succeeded", choices=[choice]).encode()


def texts(completions: list[Completion]) -> dict[str, str]:
    return {item.id: item.result.text for item in completions}


def test_each_completion_is_read_once_in_order(queue: Queue) -> None:
    run = Completions(queue, "r")
    assert run.read(0) == []
    run_all(queue, "a", "b")
    first = run.read(1)
    assert [item.id for item in first] == ["a", "b"]
    assert texts(first) == {"a": "text of a", "b": "text of b"}
    assert run.read(0) == []
    run_all(queue, "c")
    assert texts(run.read(1)) == {"c": "text of c"}


def test_another_reader_starts_at_the_first_one_kept(queue: Queue) -> None:
    """What was read and not forgotten is read again by whoever takes over."""
    run = Completions(queue, "r")
    run_all(queue, "a", "b")
    first, _ = run.read(1)
    run.forget([first])
    assert texts(Completions(queue, "r").read(1)) == {"b": "text of b"}


def test_jobs_that_ended_together_are_forgotten_one_by_one(queue: Queue) -> None:
    """Their entry stays until the last of them is: who takes over hears of all of them."""
    run_together(queue, "a", "b", "c")
    run = Completions(queue, "r")
    a, b, c = run.read(1)
    assert texts([a, b, c]) == {"a": "text of a", "b": "text of b", "c": "text of c"}
    run.forget([b])
    run.forget([a])
    assert told(queue) == [dict.fromkeys("abc", "succeeded")]
    assert key_names(queue) & {KEYS.job(name) for name in "abc"} == {KEYS.job("c")}
    heir = Completions(queue, "r")
    found = heir.read(1)
    assert texts(found) == {"a": "text of a", "b": "text of b", "c": "text of c"}
    heir.forget(found)
    assert told(queue) == []
    run.forget([c])
    assert texts(Completions(queue, "r").read(0)) == {}


def test_forgetting_deletes_the_jobs_and_ending_the_run(queue: Queue) -> None:
    run = Completions(queue, "r")
    run_all(queue, "a", "b", result_ttl_s=None)
    run.forget([])
    run.forget(run.read(1))
    assert key_names(queue) == {KEYS.meta, KEYS.done("r"), KEYS.lease("w-a")}
    run_all(queue, "c", result_ttl_s=None)
    run.forget(run.read(1))
    run.end()
    assert key_names(queue) == {KEYS.meta, KEYS.lease("w-a"), KEYS.lease("w-c")}
    assert_drained(queue)


def test_a_result_stays_for_its_run_until_the_last_one_expires(queue: Queue) -> None:
    """The job itself is unknown once its own retention is over, though another of its run is kept longer."""
    run_all(queue, "long", result_ttl_s=60.0)
    run_all(queue, "short", result_ttl_s=0.001)
    client: Any = queue.client
    assert 50_000 < client.pttl(KEYS.done("r")) <= 60_000
    while client.exists(KEYS.job("short")):
        pass
    assert queue.run(calls.look(KEYS, "short")).result is None
    assert texts(Completions(queue, "r").read(1)) == {"long": "text of long", "short": "text of short"}
    run_all(queue, "kept", result_ttl_s=None)
    run_all(queue, "last", result_ttl_s=60.0)
    assert client.ttl(KEYS.done("r")) == -1
    looked = queue.run(calls.look(KEYS, "kept")).result
    assert looked is not None
    assert looked.text == "text of kept"
    Completions(queue, "r").end()
    assert queue.run(calls.look(KEYS, "kept")).result is None
    client.delete(KEYS.job("kept"), KEYS.log("kept"))


def test_more_than_one_reading(queue: Queue) -> None:
    ids = [f"j{n}" for n in range(READ_AT_ONCE + 5)]
    client: Any = queue.client
    with client.pipeline(transaction=False) as pipe:
        for name in ids:
            pipe.xadd(KEYS.done("r"), {name: b"{}"})
        pipe.execute()
    run = Completions(queue, "r")
    read = [run.read(0) for _ in range(5)]
    assert [item.id for batch in read for item in batch] == ids
    assert [len(batch) for batch in read] == [8, 16, 32, 49, 0]


def test_runs_do_not_mix(queue: Queue) -> None:
    run_all(queue, "a")
    put(queue, "b", run="other")
    put(queue, "c")
    for lease in Worker(queue, "w2").lease(2):
        end(queue, lease)
    assert [item.id for item in Completions(queue, "r").read(1)] == ["a"]
    assert [item.id for item in Completions(queue, "other").read(1)] == ["b"]


def test_cancelled_and_failed_jobs_complete_too(queue: Queue) -> None:
    put(queue, "waits", "fails", run="r")
    queue.run(calls.cancel(KEYS, "waits"))
    end(queue, Worker(queue).lease_one(), state="failed")
    states = {item.id: item.result.state for item in Completions(queue, "r").read(1)}
    assert states == {"waits": "cancelled", "fails": "failed"}


def test_waiting_ends_with_the_first_completion(queue: Queue, server: RealServer) -> None:
    put(queue, "a", run="r")
    lease = Worker(queue).lease_one()
    got: list[Completion] = []
    waiting = threading.Thread(target=lambda: got.extend(Completions(queue, "r").read(10)))
    waiting.start()
    with redis.Redis.from_url(server.url) as other:
        client: Any = other
        while not client.info("clients")["blocked_clients"]:
            pass
        began = time.monotonic()
        end(Queue(other, KEYS), lease, text="now")
        waiting.join()
    assert time.monotonic() - began < 1.0
    assert texts(got) == {"a": "now"}


def test_everything_flushed_while_it_waits(queue: Queue, server: RealServer) -> None:
    run = Completions(queue, "r")
    run_all(queue, "a")
    run.read(1)
    got: list[Completion] = []
    waiting = threading.Thread(target=lambda: got.extend(run.read(10)))
    waiting.start()
    with redis.Redis.from_url(server.url) as other:
        client: Any = other
        while not client.info("clients")["blocked_clients"]:
            pass
        client.flushall()
        run_all(Queue(other, KEYS), "b")
    waiting.join()
    assert [item.id for item in got] == ["b"]


def test_a_wait_is_shorter_than_what_counts_as_a_lost_connection() -> None:
    assert LONGEST_BLOCK_S < SOCKET_TIMEOUT_S


@pytest.mark.usefixtures("keys_broken_by_hand")
def test_large_entries_are_read_few_at_once(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """And small ones ever more, up to a hundred."""
    monkeypatch.setattr(completions, "READ_BYTES", 1 << 16)
    client: Any = queue.client
    for size in (*[1 << 14] * 20, *[10] * 400):
        client.xadd(KEYS.done("r"), {"j": b"x" * size})
    reading = Completions(queue, "r")
    read = []
    while found := reading.read(0.001):
        read.append(len(found))
    assert read[:4] == [8, 4, 4, 4]
    assert sum(read) == 420
    assert max(read) == READ_AT_ONCE
    reading.end()
