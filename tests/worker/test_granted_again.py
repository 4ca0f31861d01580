"""A server that has lost its data grants a job again to the worker that still runs it, even as the same attempt.

What the model process still says of the first lease is not the second one's, and each job's text is whole.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker import calls
from broker.queue import Queue
from tests.worker.harness import Workers, logged, nothing_left, result, watch, words
from tests.worker.inside import InsideModel, enqueue, inside, make_worker, model_of, running, until
from worker.parent import Worker


async def in_a_step(worker: Worker) -> None:
    """Wait until the engine is in the middle of a step, whose news comes when it ends."""
    model = model_of(worker)
    seen = model.engine.stats().output_tokens
    await until(lambda: model.engine.stats().output_tokens > seen, "a step has ended")
    await asyncio.sleep(InsideModel.step_s / 4)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "not streamed"])
@pytest.mark.parametrize("heard_first", ["that it is lost", "the new lease"])
def test_the_second_life_of_a_job_has_nothing_of_the_first(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch, stream: bool, heard_first: str
) -> None:
    monkeypatch.setattr(InsideModel, "step_s", 0.04)

    async def story() -> None:
        worker = make_worker(workers.url)
        async with running(worker):
            for name in ("j", "k"):
                enqueue(queue, name, words(8), stream=stream)
            await until(lambda: worker._ledger.running == 2, "they run")
            await in_a_step(worker)
            queue.client.flushall()
            for name in ("j", "k"):
                enqueue(queue, name, words(8), stream=stream)
            if heard_first == "that it is lost":
                await worker._ledger.renew(30_000)
            worker._ledger.room_made.set()
            for name in ("j", "k"):
                await until(lambda: queue.run(calls.look(queue.keys, name)).result is not None, name)  # noqa: B023
            await until(lambda: not worker._ledger, "nothing is held")
            assert model_of(worker).engine.stats().running == 0

    inside(monkeypatch, story)
    for name in ("j", "k"):
        stored = result(queue, name)
        assert (stored.state, stored.text, stored.choices[0].token_ids) == (
            "succeeded",
            words(8),
            list(range(8)),
        )
        assert not logged(queue, name) or watch(queue, name)[0] == words(8)
    nothing_left(queue)


def test_a_gap_of_the_first_life_does_not_hand_back_the_second(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to what was told of the first comes when the second is held."""
    monkeypatch.setattr(InsideModel, "step_s", 0.02)

    async def story() -> None:
        worker = make_worker(workers.url)
        async with running(worker):
            enqueue(queue, "j", words(30))
            await until(lambda: logged(queue, "j") >= 2, "it runs")
            run_all, telling, may_tell = worker._link.queue.run_all, asyncio.Event(), asyncio.Event()

            async def slow(spoken: Any) -> Any:
                telling.set()
                await may_tell.wait()
                return await run_all(spoken)

            monkeypatch.setattr(worker._link.queue, "run_all", slow)
            await telling.wait()
            queue.client.flushall()
            enqueue(queue, "j", words(30))
            worker._ledger.room_made.set()
            (first,) = worker._ledger._held
            await until(lambda: list(worker._ledger._held) not in ([], [first]), "held anew")
            may_tell.set()
            await until(lambda: queue.run(calls.look(queue.keys, "j")).result is not None, "ended")

    inside(monkeypatch, story)
    assert (result(queue, "j").text, result(queue, "j").attempt) == (words(30), 1)
    assert watch(queue, "j")[0] == words(30)
