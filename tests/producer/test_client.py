"""The client libraries, on real servers, with a worker that needs no model."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time

import pytest

from millstream import AsyncClient, Client, Job, SamplingParams
from producer.async_client import AsyncJobHandle
from producer.client import JobHandle
from producer.dead import AsyncDeadLetters, DeadLetters
from producer.request import build_job
from protocol import (
    BrokerUnreachable,
    JobConflict,
    JobFailed,
    JobNotFound,
    QueueFull,
    RequestError,
    TerminalEvent,
)
from protocol.volume import MOST_PAYLOAD_BYTES
from tests.producer.fake_worker import Failure, FakeWorker
from tests.servers import RealServer


def refuse_three(job: Job) -> str:
    if job.prompt == "3":
        raise Failure("three is not to our taste")
    return f"answer to {job.prompt}"


def test_a_job_is_streamed_and_fetched(server: RealServer) -> None:
    with Client(server.url) as client, FakeWorker(server.url):
        job = client.submit("one two three", max_tokens=8, temperature=0)
        assert "".join(job.text_stream()) == "one two three"
        result = job.result(timeout=10, check=True)
        assert (result.text, result.state) == ("one two three", "succeeded")
        events = list(client.job(job.id).stream())
        assert isinstance(events[-1], TerminalEvent)
        assert [event.seq for event in events] == [1, 2, 3, 4]
        assert job.status().state == "succeeded"


def test_a_chat_and_token_ids_reach_the_worker(server: RealServer) -> None:
    with Client(server.url) as client, FakeWorker(server.url):
        chat = client.submit(
            messages=[{"role": "user", "content": "hello there"}], params=SamplingParams(seed=3)
        )
        ids = client.submit([5, 6, 7])
        assert chat.result(timeout=10).text == "hello there"
        assert ids.result(timeout=10).text == "5 6 7"


def test_a_result_waits_for_the_end_and_not_longer(server: RealServer) -> None:
    with Client(server.url) as client:
        job = client.submit("patience")
        before = time.monotonic()
        with pytest.raises(TimeoutError, match=job.id):
            job.result(timeout=0.3)
        assert 0.3 <= time.monotonic() - before < 2
        with FakeWorker(server.url):
            assert job.result(timeout=10).text == "patience"


def test_an_unknown_job_is_said_at_once(server: RealServer) -> None:
    with Client(server.url) as client:
        job = client.job("nobody")
        for wait in (job.result, lambda: list(job.stream())):
            with pytest.raises(JobNotFound, match="nobody"):
                wait()
        assert job.status().state is None
        assert job.cancel() == ("unknown", None)


def test_failed_jobs_have_a_result_and_raise_where_asked(server: RealServer) -> None:
    with Client(server.url) as client, FakeWorker(server.url, answer=refuse_three):
        job = client.submit("3")
        result = job.result(timeout=10)
        assert result.state == "failed"
        with pytest.raises(JobFailed, match="three is not to our taste"):
            job.result(timeout=10, check=True)


def test_cancelled_jobs_end(server: RealServer) -> None:
    with Client(server.url) as client:
        job = client.submit("never mind")
        assert job.cancel() == ("cancelled", None)
        assert job.result(timeout=5).state == "cancelled"
        assert job.cancel() == ("ended", "cancelled")


def test_the_same_id_is_the_same_job_or_a_conflict(server: RealServer) -> None:
    with Client(server.url) as client:
        client.submit("a", id="mine")
        assert client.submit("a", id="mine").id == "mine"
        assert client.status().waiting == 1
        with pytest.raises(JobConflict, match="mine"):
            client.submit("b", id="mine")


@pytest.mark.parametrize("server", ["valkey", pytest.param("redis", marks=pytest.mark.long)], indirect=True)
def test_many_jobs_go_in_order(server: RealServer) -> None:
    jobs = [Job(id=f"j{number}", prompt=str(number)) for number in range(603)]
    with Client(server.url) as client, FakeWorker(server.url, answer=refuse_three) as worker:
        handles = client.submit_many(iter(jobs))
        results = [handle.result(timeout=20) for handle in handles]
        assert [result.id for result in results] == [job.id for job in jobs]
        assert [result.id for result in results if result.state == "failed"] == ["j3"]
        assert worker.answered == [job.id for job in jobs]


def test_a_full_queue_raises_or_waits(server: RealServer) -> None:
    with Client(server.url) as client:
        client.queue.client.hset(client.queue.keys.meta, "max_entries", 2)
        jobs = [Job(id=str(number), prompt=str(number)) for number in range(5)]
        client.submit_many(jobs[:2])
        with pytest.raises(QueueFull, match="2 of 2 jobs"):
            client.submit("one too many")
        with pytest.raises(QueueFull):
            client.submit("one too many", wait_s=0.2)
        with FakeWorker(server.url):
            handles = client.submit_many(jobs, wait_s=10)
            assert [handle.result(timeout=10).text for handle in handles] == ["0", "1", "2", "3", "4"]


def test_a_server_without_memory_is_as_a_full_queue(server: RealServer) -> None:
    async def ask() -> None:
        async with AsyncClient(server.url) as client:
            with pytest.raises(QueueFull, match="memory is full"):
                await client.submit("no room either", wait_s=0.1)

    with Client(server.url) as client:
        redis = client.queue.client
        redis.config_set("maxmemory", 1)
        try:
            with pytest.raises(QueueFull, match="the server's memory is full"):
                client.submit("no room")
            asyncio.run(ask())
            freed = threading.Timer(0.2, redis.config_set, ("maxmemory", 0))
            freed.start()
            handle = client.submit("at last", wait_s=20.0)
            freed.join()
        finally:
            redis.config_set("maxmemory", 0)
        assert handle.status().state == "queued"
        assert client.status().waiting == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature"),
        ({"prompt": "x", "max_token": 3}, "max_token"),
        ({"prompt": "x", "params": SamplingParams(), "seed": 1}, "seed"),
        ({"prompt": "x", "id": "a b"}, "id"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "exactly one"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({}, "exactly one"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"prompt": "x" * MOST_PAYLOAD_BYTES}, "4 MiB"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(
    server: RealServer, arguments: dict[str, object], why: str
) -> None:
    with Client(server.url) as client:
        with pytest.raises(RequestError, match=why) as caught:
            client.submit(**arguments)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
        assert client.status().waiting == 0


def test_no_server_is_one_line() -> None:
    with pytest.raises(BrokerUnreachable, match=r"127\.0\.0\.1:1"):
        Client("redis://:secret@127.0.0.1:1")
    with pytest.raises(RequestError, match="queue"):
        Client("redis://127.0.0.1:1", queue="a:b")


def test_asyncio_does_the_same(server: RealServer) -> None:
    async def go() -> None:
        async with AsyncClient(server.url) as client:
            job = await client.submit("one two three", max_tokens=8)
            assert "".join([text async for text in job.text_stream()]) == "one two three"
            assert (await job.result(timeout=10, check=True)).text == "one two three"
            failed = await client.submit("3")
            with pytest.raises(JobFailed):
                await failed.result(timeout=10, check=True)
            many = await client.submit_many(Job(id=f"j{number}", prompt=str(number)) for number in range(700))
            results = await asyncio.gather(*(handle.result(timeout=20) for handle in many[:20]))
            assert [result.id for result in results] == [handle.id for handle in many[:20]]
            with pytest.raises(JobNotFound):
                await client.job("nobody").result()
            assert (await client.status()).workers[0].worker == "fake"
            assert await client.job("nobody").cancel() == ("unknown", None)

    with FakeWorker(
        server.url, answer=lambda job: refuse_three(job) if job.prompt == "3" else str(job.prompt)
    ):
        asyncio.run(go())


def test_asyncio_waits_no_longer_than_told(server: RealServer) -> None:
    async def go() -> None:
        async with AsyncClient(server.url) as client:
            job = await client.submit("patience")
            with pytest.raises(TimeoutError):
                await job.result(timeout=0.1)
            assert (await job.cancel())[0] == "cancelled"
            assert (await job.status()).state == "cancelled"

    asyncio.run(go())


@pytest.mark.parametrize("prompt", [b"ab", 5, {1, 2}, iter([1])])
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(prompt: object) -> None:
    with pytest.raises(RequestError, match="text or a list of token ids"):
        build_job(prompt, None, None, {}, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("blocking", "concurrent"),
    [(Client, AsyncClient), (JobHandle, AsyncJobHandle), (DeadLetters, AsyncDeadLetters)],
)
def test_both_clients_have_the_same_methods(blocking: type, concurrent: type) -> None:
    """By name, and each with the same arguments and defaults."""

    def methods(of: type) -> dict[str, object]:
        return {
            name.replace("aclose", "close"): [
                (one.name, one.kind, one.default) for one in inspect.signature(method).parameters.values()
            ]
            for name, method in inspect.getmembers(of, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert methods(concurrent) == methods(blocking)


def test_an_asyncio_client_that_is_not_open_says_how_it_is_opened() -> None:
    async def go() -> None:
        client = AsyncClient("redis://127.0.0.1:1", patience_s=0.1)
        for method in (client.submit("x"), client.status(), client.job("j").result(), client.pause()):
            with pytest.raises(RuntimeError, match="async with AsyncClient"):
                await method
        with pytest.raises(RuntimeError, match="async with AsyncClient"):
            _ = client.dead
        before = time.monotonic()
        with pytest.raises(BrokerUnreachable, match=r"127\.0\.0\.1:1"):
            await client.__aenter__()
        assert time.monotonic() - before >= 0.1, "it had patience"
        await client.aclose()

    asyncio.run(go())
