"""Leases of a reply while the logs of earlier attempts are read, which may take as long as an outage does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from broker import calls
from broker.calls import Handback
from broker.queue import Queue
from protocol import encode_token
from tests.worker.harness import Workers, logged, nothing_left, result, words
from tests.worker.inside import InsideModel, enqueue, inside, make_worker, running, until
from worker.held import Held
from worker.link import Link
from worker.parent import Worker
from worker.resume import read_logs


def hold_back(patch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Set when logs are about to be read, and to be set when they may be."""
    reading, may_read = asyncio.Event(), asyncio.Event()

    async def slow(link: Link, holding: Iterable[Held]) -> None:
        holding = list(holding)
        if any(held.lease.logged for held in holding):
            reading.set()
            await may_read.wait()
        await read_logs(link, holding)

    patch.setattr("worker.ledger.read_logs", slow)
    return reading, may_read


def hand_over(queue: Queue, **first_words: int) -> None:
    """Have an earlier owner log so many words of the jobs that wait, and give them back."""
    leases = queue.run(calls.lease(queue.keys, "earlier", 1, len(first_words), 60_000)).leases
    assert {lease.id: lease.attempt for lease in leases} == dict.fromkeys(first_words, 1)
    for job_id, count in first_words.items():
        events = [encode_token(job_id, n + 1, 1, 0, " " * (n > 0) + f"w{n}", [n]) for n in range(count)]
        assert queue.run(calls.publish(queue.keys, "earlier", job_id, 1, 1, events)).outcome == "ok"
    queue.run(calls.release(queue.keys, "earlier", [Handback(job_id, 1) for job_id in first_words]))


async def is_ready(worker: Worker) -> None:
    await until(lambda: worker._model is not None, "ready")


def test_a_deadline_counts_from_the_reply(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the log is read: the job makes no more than the steps that fit before it is heard of."""
    monkeypatch.setattr(InsideModel, "step_s", 0.05)

    async def story() -> None:
        reading, may_read = hold_back(monkeypatch)
        worker = make_worker(workers.url)
        client: Any = queue.client
        async with running(worker):
            await is_ready(worker)
            enqueue(queue, "j", words(500), deadline_in_s=0.5)
            deadline_ms = float(client.hget(queue.keys.job("j"), "deadline"))
            hand_over(queue, j=1)
            await reading.wait()

            def is_over() -> bool:
                seconds, micros = client.time()
                return 1000 * seconds + micros / 1000 > deadline_ms

            await until(is_over, "its time has come")
            may_read.set()
            look = calls.look(queue.keys, "j")
            await until(lambda: queue.run(look).state == "expired", "stopped")

    inside(monkeypatch, story)
    stored = result(queue, "j")
    assert stored.attempt == 2
    assert len(stored.choices[0].token_ids) <= 1 + 3, "it would have gone on for ten steps"
    assert words(500).startswith(stored.text)
    assert stored.text.startswith("w0")
    nothing_left(queue)


def test_a_lease_is_kept_alive_meanwhile(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        reading, may_read = hold_back(monkeypatch)
        worker = make_worker(workers.url, lease_s=0.3)
        client: Any = queue.client
        async with running(worker):
            await is_ready(worker)
            enqueue(queue, "j", words(5))
            hand_over(queue, j=2)
            await reading.wait()
            lapses = client.zscore(queue.keys.leases, "j")
            await until(lambda: client.zscore(queue.keys.leases, "j") > lapses + 300, "renewed")
            assert queue.run(calls.lease(queue.keys, "another", 1, 9, 60_000)).leases == []
            may_read.set()
            look = calls.look(queue.keys, "j")
            await until(lambda: queue.run(look).state == "succeeded", "ended")

    inside(monkeypatch, story)
    assert (result(queue, "j").text, result(queue, "j").attempt) == (words(5), 2)


@pytest.mark.parametrize("fate", ["lost", "cancelled"])
def test_one_that_is_lost_or_cancelled_meanwhile_does_not_run(
    queue: Queue,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fate: str,
) -> None:
    """Its neighbour of the same reply does."""

    async def story() -> None:
        reading, may_read = hold_back(monkeypatch)
        worker = make_worker(workers.url)
        client: Any = queue.client
        async with running(worker):
            await is_ready(worker)
            enqueue(queue, "j", words(500))
            hand_over(queue, j=1)
            enqueue(queue, "neighbour", words(3))
            await reading.wait()
            if fate == "lost":
                client.hset(queue.keys.job("j"), "worker", "another")
                await worker._ledger.renew(30_000)
                assert any("job j attempt 2: lease lost" in line for line in caplog.messages)
            else:
                assert queue.run(calls.cancel(queue.keys, "j")) == ("cancelling", None)
                await worker._ledger.renew(30_000)
            may_read.set()
            look = calls.look(queue.keys, "neighbour")
            await until(lambda: queue.run(look).state == "succeeded", "the neighbour")
            await until(lambda: len(worker._ledger) == 0, "nothing is held")
            assert worker._ledger.empty.is_set()
            if fate == "lost":
                assert logged(queue, "j") == 1
                client.hset(queue.keys.job("j"), "worker", worker.id)
                queue.run(calls.release(queue.keys, worker.id, [Handback("j", 2)]))

    inside(monkeypatch, story)
    if fate == "cancelled":
        assert (result(queue, "j").state, result(queue, "j").text) == ("cancelled", words(1))


@pytest.mark.parametrize(
    "event",
    [
        b"nonsense",
        b"\xff",
        b'{"type": "token", "id": "j", "seq": 2, "attempt": 1, "choice": -1, "text": "x", "token_ids": [1]}',
        b'{"type": "token", "id": "j", "seq": 2, "attempt": 1, "choice": 999999999, "text": "x", "token_ids": [1]}',
        b'{"type": "token", "id": "j", "seq": 2, "attempt": 1, "text": "x", "token_ids": [], "finish_reason": "new"}',
    ],
    ids=["no JSON", "no text", "a choice below 0", "a choice of another job", "of another version"],
)
def test_a_log_that_cannot_be_read_ends_its_job_and_no_worker(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch, event: bytes
) -> None:
    client: Any = queue.client
    enqueue(queue, "j", words(3))
    enqueue(queue, "neighbour", words(3))
    hand_over(queue, j=1, neighbour=2)
    client.rpush(queue.keys.log("j"), event)

    async def story() -> None:
        async with running(make_worker(workers.url)):
            for name, state in (("j", "dead"), ("neighbour", "succeeded")):
                look = calls.look(queue.keys, name)
                await until(lambda: queue.run(look).state == state, name)  # noqa: B023

    inside(monkeypatch, story)
    stored = result(queue, "j")
    assert stored.error is not None
    assert (stored.error.code, stored.text, stored.attempt) == ("spoilt_job", "w0", 2)
    assert stored.error.message.startswith("its log cannot be read")
    assert result(queue, "neighbour").text == words(3)
    assert client.xlen(queue.keys.dead) == 1
    nothing_left(queue)


def test_logs_are_read_together_and_each_job_goes_on_after_its_own(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs of one to five events, at most four in a round trip: [1 2] [3] [4] [4] [1]."""
    monkeypatch.setattr("worker.resume.EVENTS_AT_ONCE", 4)

    async def story() -> None:
        worker = make_worker(workers.url)
        trips = 0
        pipeline = worker._link.queue.client.pipeline

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal trips
            trips += 1
            return pipeline(*args, **kwargs)

        for number in range(5):
            enqueue(queue, f"j{number}", words(9))
        hand_over(queue, **{f"j{number}": number + 1 for number in range(5)})
        enqueue(queue, "fresh", words(2))
        monkeypatch.setattr(worker._link.queue.client, "pipeline", counted)
        await read_logs(worker._link, [])
        assert trips == 0
        leases = queue.run(calls.lease(queue.keys, worker.id, 1, 9, 60_000)).leases
        holding = [Held(lease, number) for number, lease in enumerate(leases)]
        await read_logs(worker._link, holding)
        assert trips == 5
        written = {held.id: held.written for held in holding}
        expected: dict[str, Any] = {f"j{number}": [(list(range(number + 1)), False)] for number in range(5)}
        assert written == expected | {"fresh": []}
        await worker._link.queue.close()

    inside(monkeypatch, story)
