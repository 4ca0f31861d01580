"""A worker that is told to stop: what fits is finished, the rest is handed back, and it ends in time, always."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest

from broker import calls
from broker.queue import Queue
from tests.worker.harness import Workers, ended, logged, result, submit, until, words
from tests.worker.inside import InsideModel, enqueue, inside, make_worker, model_of, running
from tests.worker.inside import until as until_here


def is_free(queue: Queue, job_id: str) -> bool:
    """Whether another worker could take it at once."""
    return (
        queue.run(calls.look(queue.keys, job_id)).state == "queued"
        and queue.client.zscore(queue.keys.leases, job_id) == 0
    )


def test_no_new_leases_and_what_does_not_fit_is_checkpointed_and_handed_back(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        worker = make_worker(workers.url, grace_s=2.0)  # what fits takes 0.15 s
        enqueue(queue, "fits", words(30))
        enqueue(queue, "long", words(5000), stream=False)
        async with running(worker) as task:
            await until_here(lambda: logged(queue, "fits") >= 2, "started")
            began = time.monotonic()
            worker.stop()
            enqueue(queue, "new", words(3))
            await task
            assert 1.9 < time.monotonic() - began < 20

    inside(monkeypatch, story)
    assert result(queue, "fits").text == words(30)
    assert queue.run(calls.look(queue.keys, "new")).attempt == 0
    assert is_free(queue, "long")
    assert logged(queue, "long") >= 1, "fewer than 64 tokens are logged too"
    assert queue.client.hget(queue.keys.job("long"), "crashes") == b"0"
    assert queue.run(calls.status(queue.keys)).workers == ()


def test_told_again_it_hands_back_at_once(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        worker = make_worker(workers.url, grace_s=30)
        enqueue(queue, "long", words(5000))
        async with running(worker) as task:
            await until_here(lambda: logged(queue, "long") >= 2, "started")
            worker.stop()
            await asyncio.sleep(0.05)
            assert not task.done()
            worker.stop()
            async with asyncio.timeout(15):
                await task

    inside(monkeypatch, story)
    assert is_free(queue, "long")


@pytest.mark.parametrize("hurried", [False, True])
def test_a_lease_that_is_granted_while_it_stops_is_not_left_behind(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch, hurried: bool
) -> None:
    """The reply is on its way when the signal comes: its jobs are run, or handed back, and never wait to lapse."""

    async def story() -> None:
        worker = make_worker(workers.url)
        run, granted, may_hear = worker._link.queue.run, asyncio.Event(), asyncio.Event()

        async def slow(call: Any) -> Any:
            reply = await run(call)
            if getattr(reply, "leases", None):
                granted.set()
                await may_hear.wait()
            return reply

        monkeypatch.setattr(worker._link.queue, "run", slow)
        async with running(worker) as task:
            await until_here(lambda: worker._model is not None, "ready")
            enqueue(queue, "j", words(5000 if hurried else 5))
            await granted.wait()
            worker.stop()
            if hurried:
                worker.stop()
            asyncio.get_running_loop().call_later(0.1, may_hear.set)
            await task

    inside(monkeypatch, story)
    if hurried:
        assert is_free(queue, "j")
    else:
        assert result(queue, "j").text == words(5)


def test_told_while_the_model_loads(queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    async def loads_for_ever(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(InsideModel, "load", loads_for_ever)

    def loading() -> list[tuple[str, str]]:
        return [(one.worker, one.model) for one in queue.run(calls.status(queue.keys)).loading]

    async def story() -> None:
        worker = make_worker(workers.url, grace_s=30)
        async with running(worker) as task:
            await until_here(lambda: loading() == [(worker.id, "dry-run:words")], "it says that it loads")
            worker.stop()
            async with asyncio.timeout(15):
                await task

    inside(monkeypatch, story)
    assert loading() == []


@pytest.mark.parametrize("times", [1, 2])
def test_told_while_redis_is_away(
    queue: Queue,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    times: int,
) -> None:
    """It leaves after the grace time, or at once, and its leases lapse."""
    monkeypatch.setattr("worker.parent.LEAVE_S", 0.3)

    async def story() -> None:
        worker = make_worker(workers.url, grace_s=0.3)
        enqueue(queue, "long", words(5000))
        async with running(worker) as task:
            await until_here(lambda: logged(queue, "long") >= 2, "started")

            async def gone(*_: object) -> Any:
                raise ConnectionError("gone")

            monkeypatch.setattr(worker._link.queue, "run", gone)
            monkeypatch.setattr(worker._link.queue, "run_all", gone)
            for _ in range(times):
                worker.stop()
            async with asyncio.timeout(15):
                await task

    inside(monkeypatch, story)
    assert queue.run(calls.look(queue.keys, "long")).state == "running"
    assert any("1 leases lapse within 30 s" in line for line in caplog.messages)


def test_a_burst_does_not_wait_for_jobs_of_another_day(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue(queue, "tomorrow", words(3), delay_s=86_400.0)
    enqueue(queue, "soon", words(3), delay_s=0.3)
    enqueue(queue, "now", words(3))

    async def story() -> None:
        await make_worker(workers.url, burst=True).run()

    inside(monkeypatch, story)
    assert result(queue, "now").text == result(queue, "soon").text == words(3)
    assert queue.run(calls.look(queue.keys, "tomorrow")).state == "queued"


def test_a_burst_stays_for_what_a_dead_worker_held(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue(queue, "j", words(3))
    assert queue.run(calls.lease(queue.keys, "dead", 1, 1, 1000)).leases

    async def story() -> None:
        await make_worker(workers.url, burst=True).run()

    inside(monkeypatch, story)
    assert (result(queue, "j").text, result(queue, "j").attempt) == (words(3), 2)


def test_a_step_that_is_being_told_is_told_whole_before_the_rest_is_handed_back(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to hurry in the middle of a slow pipeline, nothing is logged after the release, and nothing is lost."""

    async def story() -> None:
        worker = make_worker(workers.url)
        enqueue(queue, "long", words(5000))
        async with running(worker) as task:
            await until_here(lambda: logged(queue, "long") >= 2, "started")
            run_all, telling = worker._link.queue.run_all, asyncio.Event()

            async def slow(spoken: Any) -> Any:
                telling.set()
                await asyncio.sleep(0.1)
                return await run_all(spoken)

            monkeypatch.setattr(worker._link.queue, "run_all", slow)
            await telling.wait()
            worker.stop_now()
            await task
            made = len(model_of(worker).engine._running["1:long#1"].choices[0].answer)
            assert made == 5000

    inside(monkeypatch, story)
    assert is_free(queue, "long")
    enqueue(queue, "after", "x")
    look = queue.run(calls.look(queue.keys, "long"))
    assert look.attempt == 1


def test_a_renewal_that_meets_the_release_loses_nothing(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server has released the job and the worker has not heard of it: the renewal's answer is no news."""

    async def story() -> None:
        worker = make_worker(workers.url)
        enqueue(queue, "j", words(5000))
        async with running(worker):
            await until_here(lambda: logged(queue, "j") >= 2, "started")
            run, released, may_hear = worker._link.queue.run, asyncio.Event(), asyncio.Event()

            async def slow(call: Any) -> Any:
                reply = await run(call)
                if call.script.name == "release":
                    released.set()
                    await may_hear.wait()
                return reply

            monkeypatch.setattr(worker._link.queue, "run", slow)
            worker.stop_now()
            await released.wait()
            await worker._ledger.renew(30_000)
            may_hear.set()

    inside(monkeypatch, story)
    assert is_free(queue, "j")
    assert not any("lease lost" in line for line in caplog.messages)


def test_signals_while_nobody_answers_at_the_start(workers: Workers) -> None:
    """No Redis at all: the worker waits for it, and a signal ends that at once, as it ends everything else."""
    workers.url = "redis://127.0.0.1:1/0"
    worker = workers.start("--redis-timeout", "60", model="dry-run:echo")
    until(lambda: "queue default on" in worker.log, "waiting")
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0
    assert "Traceback" not in worker.log


@pytest.mark.long
def test_another_worker_goes_on_at_once(queue: Queue, workers: Workers) -> None:
    first = workers.start("--grace", "0.5", "--lease", "60").ready()
    submit(queue, "j", words(300))
    until(lambda: logged(queue, "j") >= 3, "started")
    workers.start().ready()
    first.signal(signal.SIGINT)
    assert first.wait() == 0
    until(lambda: queue.run(calls.look(queue.keys, "j")).attempt == 2, "not when its lease lapses", 20)
    assert ended(queue, "j").text == words(300)
