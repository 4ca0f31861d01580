"""E13: a cancel in every state, with or without a worker, stops that job within a step and no other."""

from __future__ import annotations

import pytest

from broker import calls
from broker.queue import Queue
from tests.worker.harness import ON_BOTH_SERVERS, Workers, logged, nothing_left, result, watch, words
from tests.worker.inside import enqueue, inside, make_worker, model_of, running, until


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
            await until(lambda: logged(queue, "runs") >= 5, "five words")
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
            assert logged(queue, "runs") <= at_cancel + 30, "it would have gone on for 10 s"
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
    assert text.startswith(words(5))
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
