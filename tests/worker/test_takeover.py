"""A dead worker's jobs are taken over soon after their lease lapses; those of a living one never are."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from broker import calls
from broker.queue import Queue
from tests.worker.harness import Workers, logged, result, words
from tests.worker.inside import enqueue, inside, make_worker, running, until


@pytest.mark.parametrize("busy", [False, True])
def test_a_dead_workers_job_is_taken_over_within_a_second_of_its_lapse(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    async def story() -> None:
        async with running(make_worker(workers.url)):
            if busy:
                enqueue(queue, "other", words(5000))
                await until(lambda: logged(queue, "other") >= 2, "busy, with room")
            enqueue_and_lease()
            lapses = time.monotonic() + 0.7
            look = calls.look(queue.keys, "j")
            await until(lambda: queue.run(look).state == "succeeded", "taken over")
            assert time.monotonic() - lapses < 1.0
            assert queue.run(look).attempt == 2

    def enqueue_and_lease() -> None:
        """In one go: this process's worker cannot run in between."""
        enqueue(queue, "j", words(3))
        (lease,) = queue.run(calls.lease(queue.keys, "dead", 1, 1, 700)).leases
        assert (lease.id, lease.attempt) == ("j", 1)

    inside(monkeypatch, story)
    assert result(queue, "j").text == words(3)


def test_an_outage_longer_than_the_lease_takes_no_job_from_a_living_owner(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All leases have lapsed when the server is back, and the idle worker is the first to find it."""
    monkeypatch.setattr("worker.parent.COURTESY_S", 1.2)
    away = False

    async def story() -> None:
        nonlocal away
        owner, idle = [make_worker(workers.url, lease_s=0.9) for _ in range(2)]
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(running(owner))
            enqueue(queue, "j", words(5000))
            await until(lambda: logged(queue, "j") >= 2, "owned")
            await stack.enter_async_context(running(idle))
            await until(lambda: idle._model is not None, "idle")
            for worker, late_s in [(owner, 0.3), (idle, 0.0)]:
                fail_while_away(worker._link.queue, late_s)
            away = True
            await asyncio.sleep(1.5)
            assert queue.client.zscore(queue.keys.leases, "j") < 1000 * time.time(), "lapsed"
            away = False
            before = logged(queue, "j")
            await until(lambda: logged(queue, "j") > before + 100, "it goes on")
            assert queue.run(calls.look(queue.keys, "j")).worker == owner.id
            assert queue.run(calls.look(queue.keys, "j")).attempt == 1

    def fail_while_away(queue: Any, late_s: float) -> None:
        """An owner that finds the server back a little later than others do."""
        back_at = 0.0

        def wrapped(run: Any) -> Any:
            async def act(what: Any) -> Any:
                nonlocal back_at
                if away:
                    back_at = time.monotonic() + late_s
                if time.monotonic() < back_at or away:
                    raise ConnectionError("gone")
                return await run(what)

            return act

        monkeypatch.setattr(queue, "run", wrapped(queue.run))
        monkeypatch.setattr(queue, "run_all", wrapped(queue.run_all))

    inside(monkeypatch, story)
