"""The breaker around the model: one process after the other, then no more; and who of the jobs is to blame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker import calls
from broker.calls import Handback
from broker.keys import Keys
from broker.queue import Queue
from engine.interface import DeviceLost
from tests.worker.harness import Workers, nothing_left, result, submit, until, words
from tests.worker.inside import (
    CRASH,
    DEADLINE_S,
    InsideModel,
    enqueue,
    inside,
    make_worker,
    model_of,
    running,
)
from tests.worker.inside import until as until_here
from worker import backoff
from worker.frames import Run, ToModel
from worker.ledger import Ledger
from worker.parent import Worker
from worker.quarantine import ALONE_AFTER
from worker.restarts import MOST_CRASHES, MOST_DEVICES, ModelGivenUp, Restarts

LOST = DeviceLost("CUDA error: an illegal memory access was encountered")


@pytest.fixture(autouse=True)
def _hasty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("long") is None:
        monkeypatch.setattr(backoff, "FIRST_S", 0.03)


async def with_the_model(worker: Worker, job_id: str, attempt: int) -> None:
    """Wait until the model process has a job. A suspect is not to blame before it has said so."""

    def is_there() -> bool:
        holding = worker._ledger._held.values()
        return any(
            (held.id, held.attempt, held.may_be_to_blame) == (job_id, attempt, True) for held in holding
        )

    await until_here(is_there, f"{job_id} attempt {attempt}")


def test_only_ends_in_a_row_without_a_finished_job_count() -> None:
    restarts = Restarts()
    for finished in range(20):
        for _ in range(MOST_DEVICES - 1):
            restarts.note(LOST, finished)
            restarts.check(LOST)
    restarts.note(LOST, 19)
    with pytest.raises(ModelGivenUp, match=r"3 model processes .* illegal memory access"):
        restarts.check(LOST)


def test_crashes_are_given_more_patience_for_each_convicts_one_job_at_most() -> None:
    restarts = Restarts()
    for _ in range(MOST_CRASHES - 1):
        restarts.note(CRASH, 0)
        restarts.check(CRASH)
    restarts.note(CRASH, 0)
    with pytest.raises(ModelGivenUp, match="signal 9"):
        restarts.check(CRASH)


def test_a_device_that_never_works_ends_the_worker_and_costs_no_job(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(5):
        submit(queue, f"j{number}", f"BOOM {words(20)}")

    async def story() -> None:
        worker = make_worker(workers.url, model="dry-run:words?lost=BOOM")
        with pytest.raises(ModelGivenUp, match=r"3 model processes.*fails the device.*handed back"):
            await worker.run()
        assert len(worker._ledger) == 0

    inside(monkeypatch, story)
    said = [line for line in caplog.messages if "has given up its device" in line]
    assert [line.count(f"{number} of {MOST_DEVICES} in a row") for number, line in enumerate(said, 1)] == [
        1
    ] * 3
    for number in range(5):
        look = queue.run(calls.look(queue.keys, f"j{number}"))
        assert look.state == "queued"
        assert 1 <= look.attempt <= 3, (
            "one may still wait for its next try when the others end the third process"
        )
        assert queue.client.hget(queue.keys.job(f"j{number}"), "crashes") == b"0"
    assert queue.run(calls.status(queue.keys)).workers == ()


def test_one_that_fails_the_device_is_found_alone_and_its_neighbours_are_not_blamed(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the ends jobs are finished: the device works. Tried in a batch, the last time alone."""
    enqueue(queue, "bad", words(5000))

    async def story() -> None:
        worker = make_worker(workers.url)
        look = calls.look(queue.keys, "bad")
        async with running(worker):
            for attempt in (1, 2, 3, 4):
                await with_the_model(worker, "bad", attempt)
                if attempt < 4:
                    enqueue(queue, f"ok{attempt}", words(3))
                    done = calls.look(queue.keys, f"ok{attempt}")
                    await until_here(lambda: queue.run(done).state == "succeeded", "its neighbour")  # noqa: B023
                model_of(worker).die(LOST)
            await until_here(lambda: queue.run(look).state == "failed", "convicted")

    inside(monkeypatch, story)
    stored = result(queue, "bad")
    assert stored.attempt == 4, "max_retries is 3"
    assert stored.error is not None
    assert stored.error.code == "device_error"
    assert "alone" in stored.error.message
    nothing_left(queue)


def test_a_crash_convicts_only_alone_and_the_device_never_as_poison(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two crashes with others; the third start is alone, but the end is the device's: it is tried again, alone."""
    enqueue(queue, "j", words(2000))
    enqueue(queue, "mate", words(30))

    async def story() -> None:
        worker = make_worker(workers.url)

        look = calls.look(queue.keys, "j")
        async with running(worker):
            for attempt in (1, 2):
                await with_the_model(worker, "j", attempt)
                model_of(worker).die(CRASH)
            await with_the_model(worker, "j", 3)
            model_of(worker).die(LOST)
            await with_the_model(worker, "j", 4)
            model_of(worker).die(CRASH)
            await until_here(lambda: queue.run(look).state == "dead", "convicted")
            mate = calls.look(queue.keys, "mate")
            await until_here(lambda: queue.run(mate).state == "succeeded", "the innocent neighbour")

    inside(monkeypatch, story)
    assert result(queue, "mate").text == words(30)
    assert "died 3 times, the last time with this job alone" in str(result(queue, "j").error)
    assert sum("job j attempt" in line and "runs alone" in line for line in caplog.messages) == 2
    nothing_left(queue)


class Deaf(InsideModel):
    """A process that was killed: what it said before can still be read, and nothing reaches it."""

    is_killed = False

    def send(self, frame: ToModel) -> None:
        if not self.is_killed:
            super().send(frame)


@pytest.mark.parametrize("dies_of", [CRASH, LOST])
def test_a_suspect_sent_to_a_process_that_is_dying_is_not_to_blame(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch, dies_of: Exception
) -> None:
    """Its neighbour's end is the dead process's last word, and makes it be alone. What killed it was before."""
    enqueue(queue, "j", words(20))
    for number in (1, 2):
        (lease,) = queue.run(calls.lease(queue.keys, "earlier", number, 1, 30_000)).leases
        queue.run(calls.release(queue.keys, "earlier", [Handback("j", lease.attempt, crashed=True)]))
    enqueue(queue, "mate", words(20))

    async def story() -> None:
        worker = make_worker(workers.url)
        async with running(worker):
            await until_here(lambda: queue.run(calls.look(queue.keys, "mate")).attempt == 1, "leased")
            first = model_of(worker)
            assert isinstance(first, Deaf)
            first.is_killed = True
            await until_here(lambda: worker._ledger._quarantine.alone is not None, "sent to nobody")
            assert len(worker._ledger) == 1
            first.die(dies_of)
            await until_here(
                lambda: queue.run(calls.look(queue.keys, "j")).state == "succeeded", "alone again"
            )

    inside(monkeypatch, story, Deaf)
    assert result(queue, "j").text == words(20)
    assert queue.client.hget(queue.keys.job("j"), "crashes") == b"2"
    nothing_left(queue)


def test_what_arrives_while_the_process_is_replaced_runs_in_the_next(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs taken between the end of a process and the next one, suspects among them, are neither lost nor stuck."""

    async def story() -> None:
        worker = make_worker(workers.url)
        async with running(worker):
            enqueue(queue, "first", words(100))
            await until_here(lambda: worker._ledger.running == 1, "started")
            hand_back = worker._ledger._hand_back

            async def slow(handed: object) -> None:
                monkeypatch.setattr(worker._ledger, "_hand_back", hand_back)
                enqueue(queue, "suspect", words(3))
                enqueue(queue, "plain", words(3))
                queue.client.hset(queue.keys.job("suspect"), "crashes", 2)
                call = calls.lease(queue.keys, worker.id, worker._lease_number + 1, 9, 30_000)
                worker._lease_number += 1
                await worker._ledger.take(queue.run(call).leases)
                await hand_back(handed)  # type: ignore[arg-type]

            monkeypatch.setattr(worker._ledger, "_hand_back", slow)
            model_of(worker).die(CRASH)
            for name in ("suspect", "plain"):
                look = calls.look(queue.keys, name)
                await until_here(lambda: queue.run(look).state == "succeeded", name)  # noqa: B023

    inside(monkeypatch, story)


class Slow:
    """A link whose server answers when the test says so, to the calls that end jobs or hand them back."""

    def __init__(self) -> None:
        self.keys = Keys()
        self.asked: list[str] = []
        self.answers = asyncio.Event()

    async def run(self, call: Any) -> Any:
        self.asked.append(call.script.name)
        await self.answers.wait()
        return 1 if call.script.name == "release" else ["gap" if "gap" in str(call.args) else "ok"]

    async def run_all(self, spoken: Sequence[Any]) -> list[Any]:
        return [await self.run(call) for call in spoken]


@asynccontextmanager
async def a_ledger() -> AsyncIterator[tuple[Ledger, Slow, list[ToModel], list[bool]]]:
    """A ledger that stops jobs in time, its link, what it said to model processes, and whether there is one now."""
    said: list[ToModel] = []
    is_there = [False]
    link: Any = Slow()

    def to_model(frame: ToModel) -> bool:
        if is_there[-1]:
            said.append(frame)
        return is_there[-1]

    ledger = Ledger(link, "w", to_model)
    stopping = asyncio.create_task(ledger.stop_in_time())
    yield ledger, link, said, is_there
    link.answers.set()
    await until_here(lambda: not len(ledger), "all are let go")
    stopping.cancel()


def granted(job_id: str, deadline_ms: int | None = None, crashes: int = 0) -> calls.Lease:
    return calls.Lease(job_id, 1, crashes, 0, 1, 1, b"{}", deadline_ms=deadline_ms)


@pytest.mark.parametrize("crashes", [0, ALONE_AFTER])
@pytest.mark.parametrize(
    "why", ["cancelled", "its deadline", "its log has a gap", "cancelled, and not told yet"]
)
def test_the_next_process_is_not_given_what_is_about_to_end(why: str, crashes: int) -> None:
    """Nobody would tell it that the job is over: it would run it to its end, for nobody."""

    async def story() -> None:
        async with a_ledger() as (ledger, link, said, is_there):
            deadline = 20 if why == "its deadline" else None
            await ledger.take([granted("gap" if "gap" in why else "j", deadline, crashes)])
            if why == "cancelled, and not told yet":
                await ledger._speaking.acquire()
            if why != "its deadline":
                ledger.cancel("gap" if "gap" in why else "j")
            if why == "cancelled, and not told yet":
                is_there.append(True)
                ledger.run_again()
                ledger._speaking.release()
            await until_here(lambda: link.asked == ["finish"], "its end is on its way")
            is_there.append(True)
            ledger.run_again()
            link.answers.set()
            await until_here(lambda: not len(ledger), "it is over")
            assert [frame for frame in said if isinstance(frame, Run)] == []

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))


def test_a_suspect_that_is_about_to_end_is_not_run_as_the_last_one_beside_it_goes() -> None:
    """Its Drop has been said before."""

    async def story() -> None:
        async with a_ledger() as (ledger, link, said, is_there):
            is_there.append(True)
            await ledger.take([granted("mate"), granted("suspect", crashes=ALONE_AFTER)])
            ledger.cancel("suspect")
            await until_here(lambda: link.asked == ["finish"], "its end is on its way")
            ledger._lose(next(held for held in ledger._held.values() if held.id == "mate"))
            link.answers.set()
            await until_here(lambda: not len(ledger), "it is over")
            assert [frame.key for frame in said if isinstance(frame, Run)] == ["1:mate#1"]

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))


@pytest.mark.long
def test_a_broken_device_in_a_worker_of_its_own(queue: Queue, workers: Workers) -> None:
    submit(queue, "j", f"BOOM {words(20)}")
    worker = workers.start(model="dry-run:words?lost=BOOM")
    assert worker.wait() == 1
    assert worker.log.count("has given up its device") == MOST_DEVICES
    assert worker.log.splitlines()[-1].startswith("millstream: 3 model processes ended in a row")
    assert "Traceback" not in worker.log
    assert queue.run(calls.look(queue.keys, "j")).state == "queued"
    workers.start(model="dry-run:words")
    until(
        lambda: queue.run(calls.look(queue.keys, "j")).state == "succeeded", "another worker's device works"
    )
