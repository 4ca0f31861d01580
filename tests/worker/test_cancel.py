"""E13: a cancel in every state, with or without a worker, stops that job within a step and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from broker import calls
from broker.queue import Queue
from tests.worker.harness import ON_BOTH_SERVERS, Workers, logged, nothing_left, result, watch, words
from tests.worker.inside import (
    CRASH,
    InsideModel,
    enqueue,
    inside,
    make_worker,
    model_of,
    running,
    until,
)
from worker.parent import Worker

WITHIN_STEPS = 3
"""Of 50 ms: the hint comes in the middle of one, and the next may have begun when it is heeded."""


@pytest.fixture(autouse=True)
def _slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InsideModel, "step_s", 0.05)


@ON_BOTH_SERVERS
def test_e13_in_every_state(queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot, and a window of one: `window` is leased and waits in the engine, `waits` in the stream."""

    def cancel(job_id: str) -> object:
        return queue.run(calls.cancel(queue.keys, job_id))

    def state(job_id: str) -> str | None:
        return queue.run(calls.look(queue.keys, job_id)).state

    async def story() -> None:
        worker = make_worker(workers.url, model="dry-run:words?slots=1")
        async with running(worker):
            enqueue(queue, "runs", words(2000))
            await until(lambda: logged(queue, "runs") >= 2, "two words")
            for name in ("window", "waits", "next"):
                enqueue(queue, name, words(3))
            await until(lambda: state("window") == "running", "leased")
            assert cancel("waits") == ("cancelled", None)
            assert cancel("window") == ("cancelling", None)
            await until(lambda: state("window") == "cancelled", "dropped before it began")
            assert state("runs") == "running"
            at_cancel = logged(queue, "runs")
            assert cancel("runs") == ("cancelling", None)
            await until(lambda: state("runs") == "cancelled", "stopped")
            assert logged(queue, "runs") <= at_cancel + WITHIN_STEPS + 1, "with its end"
            await until(lambda: state("next") == "succeeded", "the next one is not hit")
            await until(lambda: model_of(worker).engine.stats().running == 0, "its slot is free")
            before = result(queue, "next")
            for ended, how in [("runs", "cancelled"), ("runs", "cancelled"), ("next", "succeeded")]:
                assert cancel(ended) == ("ended", how)
            assert cancel("nobody") == ("unknown", None)
            assert result(queue, "next") == before

    inside(monkeypatch, story)
    text, events = watch(queue, "runs")
    assert events[-1].type == "cancelled"
    assert text == result(queue, "runs").text
    assert text.startswith(words(2))
    for name, attempts in [("waits", 0), ("window", 1)]:
        assert (result(queue, name).text, result(queue, name).attempt) == ("", attempts)
        assert watch(queue, name)[1][-1].type == "cancelled"
    nothing_left(queue)


@ON_BOTH_SERVERS
@pytest.mark.parametrize("restart", [False, True])
def test_e13_a_job_cancelled_while_no_worker_is_up_never_runs(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    """Nobody heard it; the truth is in the keys. With a restart a worker has had the job, and handed it back."""
    enqueue(queue, "j", words(2000))

    async def story() -> None:
        if restart:
            first = make_worker(workers.url)
            async with running(first):
                await until(lambda: logged(queue, "j") >= 2, "started")
        made = logged(queue, "j")
        assert queue.run(calls.cancel(queue.keys, "j")) == ("cancelled", None)
        enqueue(queue, "after", words(3))
        async with running(make_worker(workers.url)):
            look = calls.look(queue.keys, "after")
            await until(lambda: queue.run(look).state == "succeeded", "after")
        assert logged(queue, "j") == made + 1, "the end, and nothing else"

    inside(monkeypatch, story)
    stored = result(queue, "j")
    assert (stored.state, stored.attempt) == ("cancelled", int(restart))
    assert watch(queue, "j")[0] == stored.text
    nothing_left(queue)


@asynccontextmanager
async def beside_a_suspect_that_waits(queue: Queue, worker: Worker) -> AsyncIterator[None]:
    """The job is the suspect: it waits until a busy neighbour has ended."""
    enqueue(queue, "busy", words(2000))
    await until(lambda: logged(queue, "busy") >= 1, "busy")
    enqueue(queue, "j", words(2000), deadline_in_s=600.0)  # a job without one is not asked for its crashes
    queue.client.hset(queue.keys.job("j"), "crashes", 2)
    await until(lambda: worker._ledger.quarantined, "it waits to be alone")
    yield
    await until(lambda: not worker._ledger.quarantined, "nobody waits any more")
    assert len(worker._ledger) == 1


@asynccontextmanager
async def while_the_model_process_is_replaced(queue: Queue, worker: Worker) -> AsyncIterator[None]:
    """Its lease was on its way when the process ended: it is held, and nobody runs it."""
    load, may_load, loads = InsideModel.load, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any) -> None:
        loads.set()
        await may_load.wait()
        await load(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InsideModel, "load", slow)
        model_of(worker).die(CRASH)
        await loads.wait()
        enqueue(queue, "j", words(2000))
        worker._lease_number += 1
        lease = calls.lease(queue.keys, worker.id, worker._lease_number, 1, 30_000)
        await worker._ledger.take(queue.run(lease).leases)
        yield
        may_load.set()
        enqueue(queue, "after", words(2))
        await until(lambda: queue.run(calls.look(queue.keys, "after")).state == "succeeded", "it goes on")


@asynccontextmanager
async def while_it_drains(queue: Queue, worker: Worker) -> AsyncIterator[None]:
    """With the job gone nothing is left to wait for, and the worker ends before its grace time does."""
    enqueue(queue, "j", words(2000))
    await until(lambda: logged(queue, "j") >= 2, "started")
    worker.stop()
    yield
    await until(lambda: worker._ledger.empty.is_set(), "nothing is held")


@pytest.mark.parametrize(
    "state",
    [beside_a_suspect_that_waits, while_the_model_process_is_replaced, while_it_drains],
    ids=lambda state: state.__name__,
)
def test_e13_in_the_states_of_a_worker(
    queue: Queue,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    state: Callable[[Queue, Worker], AbstractAsyncContextManager[None]],
) -> None:
    async def story() -> None:
        worker = make_worker(workers.url, grace_s=60.0)
        async with running(worker) as task:
            await until(lambda: worker._model is not None, "ready")
            async with state(queue, worker):
                at_cancel = logged(queue, "j")
                assert queue.run(calls.cancel(queue.keys, "j")) == ("cancelling", None)
                await until(lambda: queue.run(calls.look(queue.keys, "j")).state == "cancelled", "stopped")
                assert logged(queue, "j") <= at_cancel + WITHIN_STEPS + 1, "with its end"
            if state is while_it_drains:
                await asyncio.wait_for(task, 10)

    inside(monkeypatch, story)
    text, events = watch(queue, "j")
    assert (events[-1].type, text) == ("cancelled", result(queue, "j").text)
    assert result(queue, "j").attempt == 1


def test_a_cancel_that_a_renewal_tells_of_does_not_hold_up_renewals(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has to be told of other jobs may take long, and their leases lapse meanwhile."""

    async def story() -> None:
        worker = make_worker(workers.url)
        async with running(worker):
            enqueue(queue, "j", words(2000))
            enqueue(queue, "other", words(2000))
            await until(lambda: logged(queue, "j") >= 1 and logged(queue, "other") >= 1, "started")
            async with worker._ledger._speaking:
                assert queue.run(calls.cancel(queue.keys, "j")) == ("cancelling", None)
                for _ in range(2):
                    await asyncio.wait_for(worker._ledger.renew(30_000), 5)
                assert queue.run(calls.look(queue.keys, "j")).state == "running"
            await until(lambda: queue.run(calls.look(queue.keys, "j")).state == "cancelled", "stopped")

    inside(monkeypatch, story)


def test_a_hint_for_an_earlier_life_of_a_job_does_not_cancel_the_next(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled before it ran, then submitted again under its id: workers that did not hold it have heard of it."""

    async def story() -> None:
        worker = make_worker(workers.url)
        async with running(worker):
            enqueue(queue, "busy", words(2000))
            await until(lambda: logged(queue, "busy") >= 1, "it has asked for leases before")
            worker._ledger.cancel("j")
            enqueue(queue, "j", words(2))
            await until(lambda: queue.run(calls.look(queue.keys, "j")).result is not None, "ended")

    inside(monkeypatch, story)
    assert (result(queue, "j").state, result(queue, "j").text) == ("succeeded", words(2))
