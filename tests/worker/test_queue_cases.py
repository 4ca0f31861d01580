"""Trouble that queues of this kind have had, with worker processes: trimmed streams, entries that are no jobs,
results that expired, clocks that are wrong."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.queue import Queue
from broker.watch import follow
from millstream import Client, Job
from protocol import JobNotFound, RequestError, TokenEvent
from tests.broker.steps import server_ms
from tests.broker.test_scripts_lease import FOREIGN
from tests.worker.harness import (
    ON_BOTH_SERVERS,
    Workers,
    ended,
    logged,
    nothing_left,
    result,
    submit,
    until,
    words,
)

pytestmark = [pytest.mark.long, ON_BOTH_SERVERS]


@pytest.fixture
def client(queue: Queue, workers: Workers) -> Iterator[Client]:  # noqa: ARG001  the queue is empty before
    with Client(workers.url) as opened:
        yield opened


# -- E10: a stream that somebody trims ------------------------------------------------------------------------


def test_e10_jobs_of_a_trimmed_stream_run_all_the_same(queue: Queue, workers: Workers) -> None:
    names = [f"j{n}" for n in range(5)]
    for name in names:
        submit(queue, name, words(40))
    server: Any = queue.client
    stream = queue.keys.jobs("normal", "default")
    first = workers.start("--lease", "1", model="dry-run:words?delay=40ms&slots=2").ready()
    until(lambda: logged(queue, "j0") >= 3, "running")
    assert server.zcard(queue.keys.leases) == 3
    first.kill()
    server.xtrim(stream, maxlen=1, approximate=False)
    second = workers.start("--lease", "1", model="dry-run:words?delay=5ms").ready()
    for name in names:
        assert ended(queue, name).text == words(40)
    assert second.process.poll() is None
    assert "Traceback" not in second.log
    nothing_left(queue)


def test_e10_nothing_is_trimmed_however_far_the_worker_is_behind(
    queue: Queue, workers: Workers, client: Client
) -> None:
    workers.start(model="dry-run:echo?delay=20ms").ready()
    client.pause()
    handles = client.submit_many(
        Job(id=f"j{n}", prompt=f"p{n}", run="r", stream=False) for n in range(10_000)
    )
    server: Any = queue.client
    assert server.xlen(queue.keys.jobs("normal", "default")) == 10_000
    client.resume()

    def ended() -> int:
        return sum(len(states) for _, states in server.xrange(queue.keys.done("r")))

    until(lambda: ended() == 10_000, "10,000 ends", 100)
    assert server.exists(queue.keys.jobs("normal", "default")) == 0
    nothing_left(queue)
    for handle in handles[::100]:
        ending = handle.result(timeout=0)
        assert (ending.text, ending.attempt) == ("p" + handle.id[1:], 1)


# -- E15: entries that are no jobs, and payloads that are too large --------------------------------------------


def test_e15_foreign_entries_and_large_prompts_hold_up_nobody(
    queue: Queue, workers: Workers, client: Client
) -> None:
    worker = workers.start(model="dry-run:words?delay=50ms&max_len=2000").ready()
    pid = worker.process.pid
    server: Any = queue.client
    stream = queue.keys.jobs("normal", "default")
    for fields in FOREIGN:
        server.xadd(stream, fields)
    assert client.submit("good one").result(timeout=60).text == "good one"
    letters = client.dead.list()
    assert len(letters) == len(FOREIGN)
    assert {letter.reason for letter in letters} == {"not_a_job", "lost_payload"}
    assert server.exists(stream) == 0

    with pytest.raises(RequestError, match=r"the limit is 4,194,304 \(4 MiB\)"):
        client.submit("x" * (20 << 20))
    assert server.exists(stream) == 0

    live = client.submit(words(100), id="live")
    heard: list[float] = []
    large = threading.Thread(target=lambda: client.submit("w " * (1 << 19), id="large"))
    for event in follow(queue, live.id):
        if isinstance(event, TokenEvent):
            heard.append(time.monotonic())
        if len(heard) == 5:
            large.start()
    large.join()
    assert max(later - before for before, later in itertools.pairwise(heard)) < 5.0, "with pieces of 50 ms"
    assert client.job("live").result(timeout=0).attempt == 1
    refused = client.job("large").result(timeout=60)
    assert refused.error is not None
    assert (refused.state, refused.error.code) == ("failed", "context_length_exceeded")
    assert (worker.process.poll(), worker.process.pid) == (None, pid)
    assert len(client.dead.list()) == len(FOREIGN)
    nothing_left(queue)


# -- E16: what has expired ------------------------------------------------------------------------------------


def test_e16_what_has_expired_is_told_from_what_has_not_ended(
    queue: Queue, workers: Workers, client: Client
) -> None:
    workers.start(model="dry-run:words?delay=100ms").ready()
    asked = time.monotonic()
    slow = client.submit(words(40), id="slow", result_ttl_s=2)  # its record's time is shorter than its run
    with pytest.raises(TimeoutError):
        slow.result(timeout=0)
    gone = client.submit("x", id="gone", result_ttl_s=1)
    kept = [client.submit("x", result_ttl_s=ttl) for ttl in (0, None)]
    for handle in [gone, *kept]:
        handle.result(timeout=5)
    client.pause()
    late = client.submit("x", id="late", deadline_in_s=1)
    time.sleep(3)  # the case's own time

    for handle, timeout in ((gone, 0), (gone, None)):
        started = time.monotonic()
        with pytest.raises(JobNotFound, match="its result has expired"):
            handle.result(timeout=timeout)
        assert time.monotonic() - started < 1
    started = time.monotonic()
    expired = late.result(timeout=0)
    assert time.monotonic() - started < 1
    assert (expired.state, expired.attempt) == ("expired", 0)
    client.resume()

    whole = slow.result(timeout=10)
    assert time.monotonic() - asked > 3.9
    assert (whole.text, whole.attempt) == (words(40), 1)
    assert late.result(timeout=0) == expired
    server: Any = queue.client
    for handle in kept:
        assert handle.result(timeout=0).text == "x"
        assert server.ttl(queue.keys.result(handle.id)) == -1
        server.delete(queue.keys.result(handle.id), queue.keys.job(handle.id), queue.keys.log(handle.id))


# -- E17: clocks ----------------------------------------------------------------------------------------------

SKEW = """
import os, time
_true, _true_ns = time.time, time.time_ns
def _shift():
    with open(os.environ["SKEW_FILE"]) as file:
        return float(file.read() or 0)
time.time = lambda: _true() + _shift()
time.time_ns = lambda: _true_ns() + int(_shift() * 1e9)
open(os.environ["SKEW_FILE"] + ".used", "w").close()
"""


def test_e17_no_clock_but_the_servers_decides(
    queue: Queue, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker's clock is an hour ahead, then an hour behind; the other one's is set back while it runs; the
    producer's is an hour behind. Nothing is taken from a worker that lives, and the deadline is kept."""
    (tmp_path / "sitecustomize.py").write_text(SKEW)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    )

    def start(name: str, shift_s: float) -> Path:
        clock = tmp_path / name
        clock.write_text(str(shift_s))
        monkeypatch.setenv("SKEW_FILE", str(clock))
        workers.start("--lease", "1.5", model="dry-run:words?delay=100ms").ready()
        assert clock.with_name(name + ".used").exists(), "the worker's clock is not the skewed one"
        return clock

    server: Any = queue.client
    first_clock = start("first", 0)
    submit(queue, "j1", words(50))
    until(lambda: logged(queue, "j1") >= 3, "running")
    second_clock = start("second", 3600)
    with Client(workers.url, "nobody-serves-it") as producer:
        true = time.time
        monkeypatch.setattr(time, "time", lambda: true() - 3600)
        before = server_ms(queue)
        late = producer.submit("x", deadline_in_s=10)
        deadline = int(server.hget(producer.queue.keys.job(late.id), "deadline"))
        assert before + 10_000 <= deadline <= server_ms(queue) + 10_000
        assert ended(queue, "j1").text == words(50)
        second_clock.write_text("-3600")
        submit(queue, "j2", words(50))
        until(lambda: logged(queue, "j2") >= 10, "running")
        first_clock.write_text("-30")
        assert ended(queue, "j2").text == words(50)
        until(lambda: late.status().state == "expired", "its deadline")
        expired_at = late.result(timeout=0).finished_at
        assert expired_at is not None
        assert 0 <= expired_at - deadline / 1000 < 20
    assert {result(queue, name).attempt for name in ("j1", "j2")} == {1}
    nothing_left(queue)
