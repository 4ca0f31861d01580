"""Kills, crashes, hangs and outages: every job ends once, and its stream has neither gap nor repeat."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from broker import calls
from broker.calls import Handback
from broker.queue import Queue
from tests.servers import RealServer
from tests.worker.harness import (
    DEADLINE_S,
    ON_BOTH_SERVERS,
    WORDS,
    Workers,
    ended,
    logged,
    nothing_left,
    queue_at,
    result,
    submit,
    until,
    watch,
    words,
)


@ON_BOTH_SERVERS
def test_a_worker_killed_in_the_middle_of_a_stream(queue: Queue, workers: Workers) -> None:
    """E03."""
    first = workers.start("--lease", "1").ready()
    submit(queue, "j", words(20))
    seen: list[str] = []
    watcher = threading.Thread(target=lambda: seen.append(watch(queue, "j")[0]), daemon=True)
    watcher.start()
    until(lambda: logged(queue, "j") >= 5, "five words")
    first.kill()
    workers.start("--lease", "1")
    watcher.join(DEADLINE_S)
    stored = result(queue, "j")
    assert seen == [words(20)] == [stored.text]
    assert stored.attempt == 2
    assert stored.choices[0].token_ids == list(range(20))
    nothing_left(queue)


def test_two_workers_one_killed_every_job_ends_once(queue: Queue, workers: Workers) -> None:
    run = "dry-run:words?delay=20ms&slots=8"
    for number in range(30):
        submit(queue, f"j{number}", words(10 + number % 7))
    doomed = workers.start("--lease", "1", model=run).ready()
    workers.start("--lease", "1", model=run).ready()
    until(lambda: any(logged(queue, f"j{number}") for number in range(30)), "running")
    doomed.kill()
    for number in range(30):
        text, events = watch(queue, f"j{number}")
        assert text == words(10 + number % 7) == result(queue, f"j{number}").text
        assert [event.type for event in events].count("done") == 1
    nothing_left(queue)


def test_a_model_process_that_dies_is_replaced_and_its_jobs_go_on(queue: Queue, workers: Workers) -> None:
    worker = workers.start().ready()
    submit(queue, "j", words(20))
    until(lambda: logged(queue, "j") >= 5, "five words")
    worker.model_process().kill()
    text, _ = watch(queue, "j")
    assert text == words(20)
    assert result(queue, "j").attempt == 2
    assert worker.process.poll() is None
    assert worker.log.count("the model process died") == 1
    nothing_left(queue)


@ON_BOTH_SERVERS
def test_a_job_that_kills_its_process_is_convicted_and_its_neighbours_are_not(
    queue: Queue, workers: Workers
) -> None:
    """E05: started three times at most; each of its neighbours completes once."""
    for name, prompt in [
        ("ok1", words(30)),
        ("bad", "this one goes BOOM"),
        ("ok2", words(30)),
        ("ok3", words(5)),
    ]:
        submit(queue, name, prompt)
    worker = workers.start(model="dry-run:words?delay=10ms&crash=BOOM")
    dead = ended(queue, "bad")
    assert dead.state == "dead"
    assert dead.attempt == 3, "started three times, the last time alone"
    assert dead.error is not None
    assert dead.error.code == "crashed_worker"
    for name, count in [("ok1", 30), ("ok2", 30), ("ok3", 5)]:
        text, _ = watch(queue, name)
        assert text == words(count)
        assert result(queue, name).state == "succeeded"
    ((_, letter),) = queue.client.xrange(queue.keys.dead)  # type: ignore[misc]
    assert letter[b"id"] == b"bad"
    assert b"BOOM" in letter[b"raw"]
    assert worker.process.poll() is None
    nothing_left(queue)


def test_a_worker_killed_while_a_suspect_runs_alone_convicts_nobody(queue: Queue, workers: Workers) -> None:
    submit(queue, "j", words(20))
    for number in (1, 2):
        (lease,) = queue.run(calls.lease(queue.keys, "earlier", number, 1, 30_000)).leases
        queue.run(calls.release(queue.keys, "earlier", [Handback("j", lease.attempt, crashed=True)]))
    first = workers.start("--lease", "1").ready()
    until(lambda: logged(queue, "j") >= 5, "five words")
    first.kill()
    second = workers.start("--lease", "1")
    assert watch(queue, "j")[0] == words(20)
    assert result(queue, "j").attempt == 4
    assert [worker.log.count("runs alone") for worker in (first, second)] == [1, 1]
    nothing_left(queue)


@pytest.mark.parametrize("ends_by", ["a kill", pytest.param("--step-timeout", marks=pytest.mark.long)])
def test_a_job_whose_preparation_ends_the_process_is_counted(
    queue: Queue, workers: Workers, ends_by: str
) -> None:
    """It has not begun, but it was sent: a template that fills the memory would come again for ever."""
    worker = workers.start("--step-timeout", "3").ready()
    model_process = worker.model_process()
    model_process.suspend()
    submit(queue, "j", words(3))
    until(lambda: queue.run(calls.look(queue.keys, "j")).attempt == 1, "leased")
    if ends_by == "a kill":
        model_process.kill()
    assert ended(queue, "j").text == words(3)
    assert result(queue, "j").attempt == 2
    assert "died" in worker.log
    assert "jobs running: 1" in worker.log
    assert [int(count) for count in queue.client.hmget(queue.keys.job("j"), "crashes") if count] == [1]  # type: ignore[union-attr]


def test_a_model_process_that_hangs_loses_its_jobs(queue: Queue, workers: Workers) -> None:
    worker = workers.start("--step-timeout", "3").ready()
    submit(queue, "j", words(20))
    until(lambda: logged(queue, "j") >= 3, "started")
    worker.model_process().suspend()
    text, _ = watch(queue, "j")
    assert text == words(20)
    assert "no step for 3 s" in worker.log
    assert result(queue, "j").attempt == 2


@pytest.mark.long
def test_a_parent_that_was_stopped_does_not_blame_its_model_process(queue: Queue, workers: Workers) -> None:
    """As on a machine that was suspended: the steps lie in the pipe, though the time to wait for one is over."""
    worker = workers.start("--step-timeout", "3").ready()
    submit(queue, "j", words(110))
    until(lambda: logged(queue, "j") >= 3, "started")
    worker.signal(signal.SIGSTOP)
    time.sleep(3.2)  # longer than the model process may be silent
    worker.signal(signal.SIGCONT)
    assert ended(queue, "j").attempt == 1
    assert "died" not in worker.log


def test_a_slow_step_does_not(queue: Queue, workers: Workers) -> None:
    worker = workers.start("--step-timeout", "6", "--lease", "1", model="dry-run:words?delay=1200ms").ready()
    submit(queue, "j", words(2))
    assert ended(queue, "j").attempt == 1
    assert "died" not in worker.log


def test_a_long_job_is_never_taken_from_a_living_owner(queue: Queue, workers: Workers) -> None:
    """Neither is one that waits behind it, though another worker is idle for longer than a lease lasts."""
    workers.start("--lease", "1", model="dry-run:words?delay=100ms&slots=1").ready()
    submit(queue, "long", words(1000))
    submit(queue, "prefetched", words(2))
    until(lambda: logged(queue, "long") > 0, "started")
    workers.start("--lease", "1", model="dry-run:words?delay=100ms&slots=1").ready()
    beside_from = logged(queue, "long")
    until(lambda: logged(queue, "long") >= beside_from + 15, "1.5 s beside an idle worker")
    looks = [queue.run(calls.look(queue.keys, name)) for name in ("long", "prefetched")]
    assert [(look.state, look.attempt) for look in looks] == [("running", 1)] * 2
    queue.run(calls.cancel(queue.keys, "long"))
    assert (ended(queue, "long").state, ended(queue, "long").attempt) == ("cancelled", 1)
    assert ended(queue, "prefetched").attempt == 1


@ON_BOTH_SERVERS
def test_a_zombie_is_refused(queue: Queue, workers: Workers) -> None:
    """A worker that was stopped for longer than its lease wakes up, and may neither publish nor store."""
    zombie = workers.start("--lease", "1").ready()
    submit(queue, "j", words(40))
    until(lambda: logged(queue, "j") >= 5, "five words")
    zombie.signal(signal.SIGSTOP)
    workers.start("--lease", "1").ready()
    until(lambda: queue.run(calls.look(queue.keys, "j")).attempt == 2, "taken over")
    zombie.signal(signal.SIGCONT)
    until(lambda: "lease lost" in zombie.log, "the zombie has noticed")
    text, events = watch(queue, "j")
    attempts = [event.attempt for event in events]
    assert text == words(40) == result(queue, "j").text
    assert attempts == sorted(attempts), "attempts never mix"
    assert set(attempts) == {1, 2}
    nothing_left(queue)


@pytest.mark.parametrize(
    "model", [WORDS, pytest.param("dry-run:words?delay=40ms&slots=2", marks=pytest.mark.long)]
)
def test_a_model_process_never_outlives_its_worker(queue: Queue, workers: Workers, model: str) -> None:
    worker = workers.start(model=model).ready()
    submit(queue, "j", words(500))
    until(lambda: logged(queue, "j") >= 1, "started")
    worker.kill()  # asserts that the model process ends too


@pytest.mark.long
def test_flushall_while_idle(queue: Queue, workers: Workers) -> None:
    worker = workers.start().ready()
    said_before = len(worker.log)
    queue.client.flushall()
    submit(queue, "j1", words(3))
    assert ended(queue, "j1").text == words(3)
    submit(queue, "j2", words(3))
    assert ended(queue, "j2").text == words(3)
    assert worker.process.poll() is None
    assert worker.log[said_before:] == "", "it is mended without a word"


def test_flushall_while_a_job_runs(queue: Queue, workers: Workers) -> None:
    """One that is submitted again under its id, as the same attempt of the same worker, has its text and no more."""
    worker = workers.start().ready()
    said_before = len(worker.log)
    submit(queue, "gone", words(200))
    submit(queue, "again", words(10))
    until(lambda: logged(queue, "again") >= 2, "started")
    queue.client.flushall()
    submit(queue, "again", words(10))
    assert watch(queue, "again")[0] == words(10) == result(queue, "again").text
    until(lambda: "job gone attempt 1: lease lost" in worker.log, "noticed")
    said = [
        line.partition(" WARNING ")[2] for line in worker.log[said_before:].splitlines() if "INFO" not in line
    ]
    lost = [f"job {name} attempt 1: lease lost, dropped" for name in ("again", "gone")]
    assert sorted(said) in (lost, lost[1:]), "once each; 'again' may be there again before it is missed"


def test_the_group_is_destroyed(queue: Queue, workers: Workers) -> None:
    submit(queue, "j", words(3))
    queue.client.xgroup_destroy(queue.keys.jobs("normal", "default"), "workers")
    workers.start()
    assert ended(queue, "j").text == words(3)


@pytest.mark.parametrize(
    "fresh_server", ["valkey", pytest.param("redis", marks=pytest.mark.long)], indirect=True
)
def test_a_server_that_restarts_in_the_middle(fresh_server: RealServer, tmp_path: Path) -> None:
    """The server is killed and comes back from its append-only file; the worker waits and goes on."""
    workers = Workers(fresh_server.url, tmp_path)
    try:
        with queue_at(fresh_server.url) as queue:
            queue.client.config_set("appendfsync", "always")
            worker = workers.start("--lease", "10").ready()
            submit(queue, "j", words(30))
            until(lambda: logged(queue, "j") >= 5, "five words")
            fresh_server.kill()
            until(lambda: "redis is away" in worker.log, "the worker has noticed")
            fresh_server.restart()
            text, _ = watch(queue, "j")
            assert text == words(30) == result(queue, "j").text
            assert result(queue, "j").attempt == 1
            assert worker.process.poll() is None
            assert worker.log.count("redis is away") <= 2
            nothing_left(queue)
    finally:
        workers.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_workers_killed_again_and_again(queue: Queue, workers: Workers) -> None:
    """Three workers, one killed every half second for half a minute: every job ends once, whole."""
    count = 150
    for number in range(count):
        submit(queue, f"j{number}", words(30))
    flags = ("--lease", "1")
    model = "dry-run:words?delay=30ms&slots=4"
    alive = [workers.start(*flags, model=model) for _ in range(3)]
    end = time.monotonic() + 30
    turn = 0
    while time.monotonic() < end:
        alive[turn % 3].ready()
        time.sleep(0.5)  # the time it is let live
        alive[turn % 3].kill()
        alive[turn % 3] = workers.start(*flags, model=model)
        turn += 1
    for number in range(count):
        text, events = watch(queue, f"j{number}")
        assert text == words(30) == result(queue, f"j{number}").text
        assert events[-1].type == "done"
    nothing_left(queue)
