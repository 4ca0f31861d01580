"""Worker processes for tests, started as a user starts them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from broker import calls, failpoints
from broker.connection import connect
from broker.keys import Keys
from broker.queue import Queue
from broker.watch import AnyEvent, follow
from protocol import Job, Result, SamplingParams, TokenEvent
from tests.processes import still_alive
from tests.servers import DebianRedisServer, ValkeyServer

WORDS = "dry-run:words?delay=40ms"
ON_BOTH_SERVERS = pytest.mark.parametrize(
    "server_kind", [ValkeyServer.kind, pytest.param(DebianRedisServer.kind, marks=pytest.mark.long)]
)
"""For tests that take `queue`: on the server that comes along, and at length on the oldest one that will do."""
DEADLINE_S = 120.0
"""Whatever a worker is waited for: to load torch takes it 10 s of a core, which many share."""


def until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait until a condition holds; other processes make it true, so it is looked at again and again."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.01)


class WorkerProcess:
    """A `millstream worker`, with its log."""

    def __init__(
        self,
        url: str,
        log: Path,
        *flags: str,
        model: str = WORDS,
        pass_fds: tuple[int, ...] = (),
        failpoint: str = "",
    ) -> None:
        self.log_path = log
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")
        }
        if failpoint:
            environment[failpoints.VARIABLE] = failpoint
        command = [sys.executable, "-m", "millstream", "worker", "--model", model, "--redis-url", url, *flags]
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                command, stderr=sink, stdout=sink, pass_fds=pass_fds, env=environment
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def ready(self) -> WorkerProcess:
        """Wait until it serves."""

        def served() -> bool:
            assert self.process.poll() is None, f"the worker ended:\n{self.log}"
            return "ready:" in self.log

        until(served, f"worker ready:\n{self.log}")
        return self

    def model_process(self) -> psutil.Process:
        """Its model process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, and the end of its model process with it."""
        children = psutil.Process(self.process.pid).children()
        self.process.kill()
        self.process.wait()
        assert not still_alive(children, DEADLINE_S), "the model process outlived its parent"

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.kill()


class Workers:
    """Starts workers on one server and ends them with the test."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self._started: list[WorkerProcess] = []

    def start(
        self,
        *flags: str,
        model: str = WORDS,
        pass_fds: tuple[int, ...] = (),
        failpoint: str = "",
    ) -> WorkerProcess:
        log = self.folder / f"worker-{len(self._started)}.log"
        worker = WorkerProcess(self.url, log, *flags, model=model, pass_fds=pass_fds, failpoint=failpoint)
        self._started.append(worker)
        return worker

    @property
    def last(self) -> WorkerProcess:
        """The one that was started last."""
        return self._started[-1]

    def close(self) -> None:
        for worker in self._started:
            worker.close()


@contextmanager
def queue_at(url: str) -> Iterator[Queue]:
    client = connect(url)
    queue = Queue(client, Keys())
    yield queue
    queue.close()


def submit(
    queue: Queue, job_id: str, prompt: str | list[str], *, stream: bool = True, **params: object
) -> None:
    job = Job(id=job_id, prompt=prompt, stream=stream, params=SamplingParams.model_validate(params))
    answer = queue.run(calls.submit(queue.keys, job))
    assert answer.outcome == "queued", answer


def words(count: int) -> str:
    return " ".join(f"w{number}" for number in range(count))


def watch(queue: Queue, job_id: str) -> tuple[str, list[AnyEvent]]:
    """Follow to the end: the joined text, and all events."""
    events = list(follow(queue, job_id))
    assert [event.seq for event in events] == list(range(1, len(events) + 1)), "gap or repeat"
    return "".join(event.text for event in events if isinstance(event, TokenEvent)), events


def result(queue: Queue, job_id: str) -> Result:
    found = queue.run(calls.look(queue.keys, job_id)).result
    assert found is not None, f"{job_id} has no result"
    return found


def ended(queue: Queue, job_id: str) -> Result:
    """Wait for the end, then the result."""
    for _ in follow(queue, job_id):
        pass
    return result(queue, job_id)


def logged(queue: Queue, job_id: str) -> int:
    return queue.client.llen(queue.keys.log(job_id))  # type: ignore[return-value]


def nothing_left(queue: Queue) -> None:
    """No entry, no lease, no count is left of jobs that have ended."""
    status = queue.run(calls.status(queue.keys))
    assert (status.waiting, status.running, status.bytes) == (0, 0, 0)
    assert queue.client.zcard(queue.keys.leases) == 0
    assert list(queue.client.scan_iter(f"{queue.keys.base}jobs:*")) == []
