"""What can pass is tried again after a while, going on where it stopped; what cannot is not."""

from __future__ import annotations

import pytest

from broker import calls
from broker.queue import Queue
from engine.dry_run import _fraction
from protocol import TokenEvent
from tests.worker.harness import Workers, ended, nothing_left, result, submit, watch, words
from tests.worker.inside import enqueue, inside, make_worker, running, until
from worker import backoff
from worker.backoff import backoff_s


@pytest.mark.parametrize(("retries", "longest"), [(0, 1), (1, 2), (2, 4), (5, 32), (6, 60), (1000, 60)])
def test_waits_double_are_bounded_and_spread(retries: int, longest: float) -> None:
    waits = [backoff_s(retries) for _ in range(200)]
    assert all(longest / 2 <= wait <= longest for wait in waits)
    assert max(waits) - min(waits) > longest / 4


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST_S", 0.04)


def drawn(job_id: str, flaky: float) -> tuple[str, int]:
    """How a job of a dry run ends, and at which of its four attempts: that hangs on the attempts' ids alone."""
    for attempt in range(1, 5):
        if _fraction(f"{attempt}:{job_id}") >= flaky:
            return "succeeded", attempt
    return "failed", 4


@pytest.mark.usefixtures("_hasty")
def test_flaky_attempts_end_as_undisturbed_ones(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of all attempts fail half-way: text, ids and stream are whole, and a burst waits for the last."""
    count = 24
    for number in range(count):
        submit(queue, f"j{number}", [words(12), words(7)], n=2)

    async def story() -> None:
        worker = make_worker(workers.url, model="dry-run:words?flaky=0.5", burst=True)
        await worker.run()

    inside(monkeypatch, story)
    ends = [result(queue, f"j{number}") for number in range(count)]
    assert [(stored.state, stored.attempt) for stored in ends] == [drawn(stored.id, 0.5) for stored in ends]
    for stored in ends:
        if stored.state == "failed":
            assert stored.error is not None
            assert stored.error.code == "device_error"
            continue
        assert [choice.text for choice in stored.choices] == [words(12)] * 2 + [words(7)] * 2
        assert [choice.token_ids for choice in stored.choices] == [list(range(12))] * 2 + [list(range(7))] * 2
        _, events = watch(queue, stored.id)
        for choice, count_of in enumerate([12, 12, 7, 7]):
            told = [event for event in events if isinstance(event, TokenEvent) and event.choice == choice]
            assert "".join(event.text for event in told) == words(count_of)
        attempts = [event.attempt for event in events]
        assert attempts == sorted(attempts)
    assert {stored.attempt for stored in ends if stored.state == "succeeded"} >= {1, 2, 3}
    nothing_left(queue)


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize("max_retries", [0, 2])
def test_the_last_try_ends_it_with_what_was_made(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch, max_retries: int
) -> None:
    enqueue(queue, "j", words(10), max_retries=max_retries)

    async def story() -> None:
        await make_worker(workers.url, model="dry-run:words?flaky=1", burst=True).run()

    inside(monkeypatch, story)
    stored = result(queue, "j")
    assert (stored.state, stored.attempt, stored.text) == ("failed", max_retries + 1, words(5))
    text, events = watch(queue, "j")
    assert text == words(5)
    assert events[-1].type == "error"
    assert queue.client.hget(queue.keys.job("j"), "crashes") in (None, b"0")


def test_an_error_that_cannot_pass_is_not_tried_again(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(queue, "j", words(10))

    async def story() -> None:
        await make_worker(workers.url, model="dry-run:words?fail=1", burst=True).run()

    inside(monkeypatch, story)
    assert (result(queue, "j").state, result(queue, "j").attempt) == ("failed", 1)


def test_a_job_that_waits_for_its_next_try_can_be_cancelled_and_runs_nowhere_before(
    queue: Queue, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(queue, "j", words(10))

    async def story() -> None:
        worker = make_worker(workers.url, model="dry-run:words?flaky=1")
        async with running(worker):
            look = calls.look(queue.keys, "j")
            await until(lambda: worker._ledger.retried_until > 0 and not worker._ledger, "handed back")
            assert (queue.run(look).state, queue.run(look).attempt) == ("queued", 1)
            assert queue.run(calls.cancel(queue.keys, "j")) == ("cancelled", None)
            assert queue.run(look).attempt == 1

    inside(monkeypatch, story)
    assert result(queue, "j").text == words(5), "what was made is kept"


@pytest.mark.long
def test_flaky_attempts_in_a_worker_of_its_own(queue: Queue, workers: Workers) -> None:
    for number in range(40):
        submit(queue, f"j{number}", words(20))
    worker = workers.start(model="dry-run:words?flaky=0.3&delay=5ms")
    for number in range(40):
        stored = ended(queue, f"j{number}")
        assert (stored.state, stored.attempt) == drawn(stored.id, 0.3)
        assert stored.text == words(20 if stored.state == "succeeded" else 10)
    assert "tried again in" in worker.log
    assert worker.process.poll() is None
    nothing_left(queue)
