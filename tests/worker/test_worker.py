"""A worker does what a queue asks of it, and nobody outlives anybody."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from broker import calls
from broker.queue import Queue
from protocol import TerminalEvent, TokenEvent
from tests.processes import still_alive
from tests.worker.harness import (
    ON_BOTH_SERVERS,
    WORDS,
    Workers,
    ended,
    logged,
    nothing_left,
    result,
    submit,
    until,
    watch,
    words,
)


def test_a_job_is_streamed_while_it_runs_and_its_result_is_stored(queue: Queue, workers: Workers) -> None:
    workers.start()
    submit(queue, "j", words(8), seed=5)
    text, events = watch(queue, "j")
    stored = result(queue, "j")
    assert text == words(8) == stored.text
    assert stored.state == "succeeded"
    assert stored.choices[0].finish_reason == "stop"
    assert (stored.attempt, stored.seed, stored.model) == (1, 5, "dry-run:words")
    assert stored.usage is not None
    assert (stored.usage.prompt_tokens, stored.usage.completion_tokens) == (8, 8)
    assert stored.started_at is not None
    assert stored.finished_at is not None
    assert stored.finished_at - stored.started_at >= 0.04 * 7, "a step is 40 ms"
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert len(tokens) == 8
    assert [token.finish_reason for token in tokens] == [None] * 7 + ["stop"]
    assert isinstance(events[-1], TerminalEvent)
    assert events[-1].type == "done"
    nothing_left(queue)


def test_a_job_that_nobody_streams_is_logged_in_larger_pieces(queue: Queue, workers: Workers) -> None:
    workers.start(model="dry-run:words")
    submit(queue, "j", words(200), stream=False)
    text, events = watch(queue, "j")
    assert text == words(200)
    assert len(events) <= 200 // 64 + 2


def test_jobs_share_the_batch_up_to_the_slots(queue: Queue, workers: Workers) -> None:
    for number in range(12):
        submit(queue, f"j{number}", words(20))
    worker = workers.start(model="dry-run:words?delay=20ms&slots=4").ready()
    until(lambda: logged(queue, "j0") > 2, "running")
    status = queue.run(calls.status(queue.keys))
    assert status.running == 5, "4 slots, and a waiting window of one"
    assert status.waiting == 7
    for number in range(12):
        assert ended(queue, f"j{number}").text == words(20)
    assert worker.process.poll() is None
    nothing_left(queue)


def test_a_bad_job_fails_alone_with_words_for_its_user(queue: Queue, workers: Workers) -> None:
    workers.start()
    queue.client.hset(queue.keys.meta, "probe", 1)
    submit(queue, "empty", "")
    submit(queue, "good", words(3))
    failed = ended(queue, "empty")
    assert failed.state == "failed"
    assert failed.error is not None
    assert failed.error.code == "invalid_request"
    assert "empty" in failed.error.message
    assert failed.attempt == 1
    assert ended(queue, "good").text == words(3)


NO_JOBS = {
    "not-JSON": b"{not json",
    "a-list": b"[1,2,3]",
    "nothing": b"null",
    "no-text": b"\xff\xfe\x00\xff",
    "of-another-version": b'{"v":99,"id":"of-another-version","prompt":"x"}',
    "without-a-prompt": b'{"id":"without-a-prompt"}',
}


def test_payloads_that_are_no_jobs_fail_alone(queue: Queue, workers: Workers) -> None:
    for number, (job_id, payload) in enumerate(NO_JOBS.items()):
        submit(queue, job_id, "to be damaged")
        queue.client.hset(queue.keys.job(job_id), "payload", payload)
        submit(queue, f"good-{number}", words(3))
    worker = workers.start()
    for number, job_id in enumerate(NO_JOBS):
        failed = ended(queue, job_id)
        assert failed.state == "failed", job_id
        assert failed.error is not None
        assert failed.error.code == "invalid_request", job_id
        assert ended(queue, f"good-{number}").text == words(3)
    assert worker.process.poll() is None


def test_entries_that_are_no_jobs_go_to_the_dead_letters(queue: Queue, workers: Workers) -> None:
    worker = workers.start().ready()
    stream = queue.keys.jobs("normal", "default")
    submit(queue, "first", words(2))
    for fields in ({"x": "no id"}, {"payload": "{not json"}, {"id": "never-submitted"}):
        queue.client.xadd(stream, fields)  # type: ignore[arg-type]
    queue.client.zadd(queue.keys.tenants("normal"), {"default": 0}, nx=True)
    submit(queue, "good", words(2))
    assert ended(queue, "good").text == words(2)
    until(lambda: queue.client.xlen(queue.keys.dead) == 3, "three dead letters")
    assert worker.process.poll() is None
    nothing_left(queue)


def test_two_workers_share_a_queue(queue: Queue, workers: Workers) -> None:
    both = [workers.start(model="dry-run:words?delay=20ms&slots=4") for _ in range(2)]
    for worker in both:
        worker.ready()
    for number in range(40):
        submit(queue, f"j{number}", words(10))
    results = [ended(queue, f"j{number}") for number in range(40)]
    assert all(one.text == words(10) and one.attempt == 1 for one in results)
    assert len({one.worker for one in results}) == 2
    nothing_left(queue)


def test_cancel_in_every_state(queue: Queue, workers: Workers) -> None:
    workers.start(model="dry-run:words?delay=50ms&slots=1")
    submit(queue, "running", words(100))
    until(lambda: logged(queue, "running") >= 5, "five words")
    for name in ("window", "waiting"):
        submit(queue, name, words(3))
    submit(queue, "next", words(3))
    assert queue.run(calls.cancel(queue.keys, "waiting")) == ("cancelled", None)
    assert queue.run(calls.cancel(queue.keys, "running")) == ("cancelling", None)
    text, events = watch(queue, "running")
    partial = result(queue, "running")
    assert partial.state == "cancelled"
    assert partial.text == text
    assert words(100).startswith(text)
    assert 5 <= len(partial.choices[0].token_ids) < 50
    assert events[-1].type == "cancelled"
    assert ended(queue, "waiting").attempt == 0
    assert queue.run(calls.cancel(queue.keys, "running")) == ("ended", "cancelled")
    assert queue.run(calls.cancel(queue.keys, "unknown")) == ("unknown", None)
    assert ended(queue, "next").text == words(3)
    assert ended(queue, "window").text == words(3)
    nothing_left(queue)


def test_sigterm_finishes_what_fits_in_the_grace_time(queue: Queue, workers: Workers) -> None:
    worker = workers.start().ready()
    submit(queue, "j", words(20))
    until(lambda: logged(queue, "j") >= 3, "started")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert result(queue, "j").text == words(20)
    assert queue.run(calls.status(queue.keys)).workers == ()


@pytest.mark.parametrize("second", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT])
def test_a_second_signal_hands_the_jobs_back_at_once(queue: Queue, workers: Workers, second: int) -> None:
    worker = workers.start().ready()
    submit(queue, "j", words(30))
    until(lambda: logged(queue, "j") >= 3, "started")
    worker.signal(signal.SIGTERM)
    until(lambda: "stopping" in worker.log, "first signal heard")
    worker.signal(second)
    assert worker.wait() == 0
    before = logged(queue, "j")
    assert 3 <= before < 30
    workers.start()
    text, _ = watch(queue, "j")
    assert text == words(30)
    assert result(queue, "j").attempt == 2


def test_burst_ends_with_the_queue(queue: Queue, workers: Workers) -> None:
    for number in range(30):
        submit(queue, f"j{number}", words(3))
    assert workers.start("--burst", model="dry-run:echo").wait() == 0
    assert all(result(queue, f"j{number}").text == words(3) for number in range(30))


def test_a_leash_that_is_let_go_ends_the_worker(queue: Queue, workers: Workers) -> None:
    read, write = os.pipe()
    worker = workers.start("--leash-fd", str(read), pass_fds=(read,)).ready()
    os.close(read)
    submit(queue, "j", words(100))
    until(lambda: logged(queue, "j") >= 2, "started")
    children = psutil.Process(worker.process.pid).children()
    os.close(write)
    assert worker.wait(30) == 0
    assert still_alive(children, 30) == []
    assert queue.run(calls.look(queue.keys, "j")).state == "queued"


def test_another_model_is_refused(workers: Workers) -> None:
    workers.start(model="dry-run:words").ready()
    other = workers.start(model="dry-run:echo")
    assert other.wait() == 1
    assert "dry-run:words" in other.log
    assert "dry-run:echo" in other.log
    assert "Traceback" not in other.log


def test_a_model_that_is_not_there_is_one_line(workers: Workers) -> None:
    worker = workers.start(model="no/such-model-anywhere.gguf")
    assert worker.wait(60) == 1
    assert "no/such-model-anywhere" in worker.log.splitlines()[-1]
    assert "Traceback" not in worker.log


@pytest.mark.usefixtures("keys_broken_by_hand")
@pytest.mark.parametrize(
    "name", ["meta", *(pytest.param(name, marks=pytest.mark.long) for name in ("leases", "workers"))]
)
def test_a_foreign_key_in_a_queues_place_stops_no_worker(queue: Queue, workers: Workers, name: str) -> None:
    """It goes, and the queue's own takes its place."""
    queue.client.set(queue.keys.base + name, "somebody else's")
    submit(queue, "j", "text")
    worker = workers.start("--burst", model="dry-run:echo")
    assert worker.wait() == 0
    assert result(queue, "j").text == "text"
    assert "Traceback" not in worker.log


def test_flags_that_contradict_each_other_are_one_line(workers: Workers) -> None:
    worker = workers.start("--num-kv-blocks", "8", "--max-num-seqs", "128", model="dry-run:echo")
    assert worker.wait() == 2
    assert worker.log == (
        "millstream: --num-kv-blocks 8 is less than one block for each of 128 slots (--max-num-seqs): "
        "give --num-kv-blocks 128, or --max-num-seqs 8\n"
    )


@pytest.mark.long
def test_flags_that_the_model_does_not_allow_end_the_worker_once(
    workers: Workers, tiny_model_dir: Path
) -> None:
    """Found out by the model process: it is not started again."""
    worker = workers.start("--max-model-len", "9999", model=str(tiny_model_dir))
    assert worker.wait() == 2
    assert worker.log.splitlines()[-1] == (
        "millstream: --max-model-len 9999 is more than the model serves: sequences of at most 256 tokens: "
        "give --max-model-len 256"
    )
    assert worker.log.count(f"loading {tiny_model_dir}") == 1
    assert "Traceback" not in worker.log


def test_a_redis_that_is_not_there_is_one_line(workers: Workers) -> None:
    workers.url = "redis://:secret@127.0.0.1:1/0"
    worker = workers.start("--redis-timeout", "1", model="dry-run:echo")
    assert worker.wait() == 1
    assert "127.0.0.1:1" in worker.log.splitlines()[-1]
    assert "secret" not in worker.log
    assert "Traceback" not in worker.log


@pytest.mark.long
def test_heartbeats_tell_how_a_worker_does(queue: Queue, workers: Workers) -> None:
    worker = workers.start().ready()
    (beat,) = queue.run(calls.status(queue.keys)).workers
    assert beat.alive
    assert beat.info["pid"] == worker.process.pid
    assert beat.info["model"] == "dry-run:words"
    assert beat.info["slots"] == 256
    assert beat.info["engine"] == {}
    submit(queue, "j", words(3))
    ended(queue, "j")

    def counted() -> bool:
        (beat,) = queue.run(calls.status(queue.keys)).workers
        return beat.info["engine"].get("output_tokens", 0) >= 3

    until(counted, "the engine's counters in a heartbeat")


@ON_BOTH_SERVERS
def test_a_cancel_that_meets_the_end_hits_nobody_else(queue: Queue, workers: Workers) -> None:
    workers.start(model="dry-run:words?slots=1")
    for number in range(60):
        submit(queue, f"a{number}", words(2))
        submit(queue, f"b{number}", words(2))
        canceller = threading.Thread(target=queue.run, args=(calls.cancel(queue.keys, f"a{number}"),))
        canceller.start()
        assert ended(queue, f"b{number}").text == words(2)
        canceller.join()
        assert ended(queue, f"a{number}").state in {"succeeded", "cancelled"}
    nothing_left(queue)


def test_one_step_of_delay_is_what_words_takes(queue: Queue, workers: Workers) -> None:
    """The words engine makes one word a step: tokens arrive while the job runs, not at its end."""
    workers.start(model=WORDS).ready()
    submit(queue, "j", words(30))
    until(lambda: 0 < logged(queue, "j") < 20, "some words, not all")
    assert queue.run(calls.look(queue.keys, "j")).state == "running"
