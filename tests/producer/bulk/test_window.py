"""What the server lost is submitted again: the collector sees it by the server's run id and the queue's mark. So is
what it had no room for, and what was on its way when it went; what is stored is deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from broker import calls
from broker.connection import connect
from broker.keys import Keys
from broker.queue import Queue
from producer.bulk import window as module
from producer.bulk.intake import Ask
from producer.bulk.lines import Row
from producer.bulk.requests import RowJob
from producer.bulk.stale import jobs_of
from producer.bulk.window import Window
from producer.request import build_job
from protocol import Job, Result
from tests.broker.steps import Worker, finish_call
from tests.servers import RealServer

RUN = "run"


@pytest.fixture(autouse=True)
def _asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EPOCH_S", 0.0)


@pytest.fixture
def queue(fresh_server: RealServer) -> Iterator[Queue]:
    opened = Queue(connect(fresh_server.url, patience_s=20.0), Keys())
    yield opened
    opened.close()


def admitted(queue: Queue, count: int) -> Window:
    """A window with so many rows on the queue."""
    window = Window(queue, RUN, 100)
    for number in range(count):
        window.admit(Ask(Row(number, "digest", {}), RowJob.of(_job(number)), 10))
    submit(window)
    assert window.collect(0.01) == []
    return window


def submit(window: Window) -> None:
    """Queue what waits, and wait until it is there."""
    assert window.submit()
    assert window.settle()


def _job(number: int) -> Job:
    return build_job("p", None, None, {}, f"{RUN}.{number}", run=RUN)


def end_all(queue: Queue, worker: Worker) -> None:
    """Lease and end whatever waits."""
    for lease in worker.lease(100):
        assert queue.run(finish_call(queue.keys, lease, 0, "")) == "ok"


def collected(window: Window) -> list[int]:
    """The lines of the rows that come out."""
    lines = [ended.row.line for ended in window.collect(0.01)]
    window.forget_stored()
    return sorted(lines)


def flushed(queue: Queue, server: RealServer) -> None:  # noqa: ARG001
    queue.client.flushall()


def restarted_empty(queue: Queue, server: RealServer) -> None:  # noqa: ARG001
    server.kill()
    server.options[1] = "no"  # without its append-only file
    server.start()


def restarted_with_some(queue: Queue, server: RealServer) -> None:
    """The end of the append-only file is lost: the mark is there, a job is not."""
    server.restart()
    client: Any = queue.client
    client.delete(queue.keys.job(f"{RUN}.2"))


@pytest.mark.parametrize("lose", [flushed, restarted_empty, restarted_with_some])
def test_what_the_server_lost_is_submitted_again(
    queue: Queue, fresh_server: RealServer, lose: Callable[[Queue, RealServer], None]
) -> None:
    """While other rows go on ending, so that there is no silence that would tell."""
    window = admitted(queue, 3)
    worker = Worker(queue)
    (lease,) = worker.lease(1)
    assert queue.run(finish_call(queue.keys, lease, 0, "")) == "ok"
    assert collected(window) == [0]
    queue.client.config_set("appendfsync", "always")
    lose(queue, fresh_server)
    window.collect(0.01)
    submit(window)
    assert queue.run(calls.look(queue.keys, f"{RUN}.2")).state == "queued"
    end_all(queue, Worker(queue, "another"))
    assert collected(window) == [1, 2]
    assert len(window) == 0


def test_nothing_is_asked_again_of_a_server_that_lost_nothing(queue: Queue, fresh_server: RealServer) -> None:
    window = admitted(queue, 2)
    queue.client.config_set("appendfsync", "always")
    end_all(queue, Worker(queue))
    fresh_server.restart()
    assert collected(window) == [0, 1]
    assert queue.run(calls.status(queue.keys)).waiting == 0


def test_a_stream_that_begins_again_further_back_is_read(queue: Queue) -> None:
    """A server with another clock, emptied: what it announces comes before what was announced by the old one."""
    window = admitted(queue, 2)
    client: Any = queue.client
    (lease,) = Worker(queue).lease(1)
    queue.run(finish_call(queue.keys, lease, 0, ""))
    assert collected(window) == [0]
    client.flushall()
    assert window.collect(0.01) == []
    submit(window)
    client.xadd(queue.keys.done(RUN), {f"{RUN}.1": _result(f"{RUN}.1")}, id="1-1")
    assert collected(window) == [1]


def _result(job_id: str) -> bytes:
    return Result(id=job_id, state="succeeded", choices=[], attempt=1).encode()


def test_rows_for_which_the_queue_has_no_room_wait_again(queue: Queue) -> None:
    queue.run(calls.limits(queue.keys, max_entries=2))
    window = Window(queue, RUN, 100)
    for number in range(3):
        window.admit(Ask(Row(number, "digest", {}), RowJob.of(_job(number)), 10))
    assert window.submit()  # nothing is known yet
    assert not window.settle()
    assert (len(window), queue.run(calls.status(queue.keys)).waiting) == (3, 2)
    end_all(queue, Worker(queue))
    assert collected(window) == [0, 1]
    submit(window)
    end_all(queue, Worker(queue, "another"))
    assert collected(window) == [2]


def test_what_was_sent_to_a_server_that_was_away_is_sent_again(fresh_server: RealServer) -> None:
    queue = Queue(connect(fresh_server.url), Keys())
    window = admitted(queue, 1)
    end_all(queue, Worker(queue))
    assert collected(window) == [0]
    fresh_server.kill()
    window.admit(Ask(Row(1, "digest", {}), RowJob.of(_job(1)), 10))
    assert window.submit()
    with pytest.raises(redis.ConnectionError):
        window.settle()
    fresh_server.start()
    submit(window)
    assert jobs_of(queue, RUN) == {f"{RUN}.1"}
    queue.close()


def test_nothing_is_left_of_stored_rows_on_the_server(queue: Queue) -> None:
    window = admitted(queue, 2)
    (lease,) = Worker(queue).lease(1)
    queue.run(finish_call(queue.keys, lease, 0, ""))
    assert collected(window) == [0]
    window.leave()
    assert jobs_of(queue, RUN) == {f"{RUN}.1"}
    end_all(queue, Worker(queue, "another"))
    assert collected(window) == [1]
    window.end()
    assert jobs_of(queue, RUN) == set()
    client: Any = queue.client
    assert client.exists(queue.keys.done(RUN)) == 0


def test_what_is_on_its_way_has_arrived_when_a_window_closes(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = Window(queue, RUN, 100)
    window.admit(Ask(Row(0, "digest", {}), RowJob.of(_job(0)), 10))
    closes = threading.Event()
    send = queue.run_all

    def late(sent: Any) -> Any:
        assert closes.wait(10)
        return send(sent)

    monkeypatch.setattr(queue, "run_all", late)
    assert window.submit()
    assert jobs_of(queue, RUN) == set()
    threading.Timer(0.1, closes.set).start()
    window.close()
    assert jobs_of(queue, RUN) == {f"{RUN}.0"}
