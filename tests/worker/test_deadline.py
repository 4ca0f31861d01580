"""A job is stopped at its deadline, by whoever holds it, within a step; what was made of it is kept."""

from __future__ import annotations

import time

import pytest

from broker import calls
from broker.queue import Queue
from tests.worker.harness import Workers, ended, logged, nothing_left, result, submit, until, watch, words
from tests.worker.inside import enqueue, inside, make_worker, model_of, running
from tests.worker.inside import until as until_here


def test_a_running_job_is_stopped_at_its_deadline(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with a later deadline is taken first, so the timer has to be set anew; its neighbours go on."""

    async def story() -> None:
        worker = make_worker(workers.url)
        async with running(worker):
            enqueue(queue, "late", words(5000), deadline_in_s=60.0)
            enqueue(queue, "free", words(5000))
            await until_here(lambda: logged(queue, "late") >= 2, "started")
            submitted = time.monotonic()
            enqueue(queue, "soon", words(5000), deadline_in_s=0.3)
            look = calls.look(queue.keys, "soon")
            await until_here(lambda: queue.run(look).state == "expired", "stopped")
            assert 0.25 <= time.monotonic() - submitted < 20.0
            model = model_of(worker)
            await until_here(lambda: model.engine.stats().running == 2, "dropped")
            await until_here(lambda: len(worker._ledger) == 2, "the worker has heard of it")
            dropped_at = logged(queue, "free")
            await until_here(lambda: logged(queue, "free") >= dropped_at + 5, "its neighbour goes on")

    inside(monkeypatch, story)
    stored = result(queue, "soon")
    assert stored.error is not None
    assert stored.error.code == "deadline_exceeded"
    text, events = watch(queue, "soon")
    assert text == stored.text
    assert words(5000).startswith(text)
    assert 1 <= len(stored.choices[0].token_ids) <= 100, "a step is 5 ms"
    assert (events[-1].type, stored.attempt) == ("expired", 1)
    assert [queue.run(calls.look(queue.keys, name)).state for name in ("late", "free")] == ["queued"] * 2


def test_a_suspect_that_waits_to_be_alone_is_stopped_too(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue(queue, "suspect", words(5), deadline_in_s=0.5)
    queue.client.hset(queue.keys.job("suspect"), "crashes", 2)

    async def story() -> None:
        worker = make_worker(workers.url)
        enqueue(queue, "busy", words(5000), priority="high")
        async with running(worker):
            look = calls.look(queue.keys, "suspect")
            await until_here(lambda: queue.run(look).state == "expired", "stopped")
            await until_here(lambda: not worker._ledger.quarantined, "the worker has heard of it")
            enqueue(queue, "next", words(3))
            await until_here(lambda: queue.run(calls.look(queue.keys, "next")).state == "succeeded", "room")

    inside(monkeypatch, story)
    assert result(queue, "suspect").text == ""


@pytest.mark.long
def test_a_deadline_in_a_worker_of_its_own(queue: Queue, workers: Workers) -> None:
    worker = workers.start("--lease", "2", model="dry-run:words?delay=50ms").ready()
    enqueue(queue, "soon", words(400), deadline_in_s=1.0, stream=False)
    submit(queue, "j", words(40))
    until(lambda: logged(queue, "j") >= 2, "started")
    stored = ended(queue, "soon")
    assert stored.state == "expired"
    assert 1 <= len(stored.choices[0].token_ids) <= 100
    assert words(400).startswith(stored.text), "what was not logged yet is kept too"
    assert "job soon attempt 1: expired" in worker.log
    assert ended(queue, "j").text == words(40)
    nothing_left(queue)
