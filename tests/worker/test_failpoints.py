"""A worker is killed at every moment of a job's way and another takes over: one end, one result, one whole stream.

    leased -> started -> stepped -> heard -> published -> ... -> finished
                                                   told to stop: checkpointed -> handed back

What a client loses by that is time. `broker.failpoints` says what has happened at each.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from broker import calls, failpoints
from broker.queue import Queue
from broker.watch import AnyEvent
from protocol import Result
from tests.servers import DebianRedisServer, ValkeyServer
from tests.worker.harness import (
    DEADLINE_S,
    WorkerProcess,
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

MODEL = "dry-run:words?delay=30ms"
LEASE = ("--lease", "1")
SHORT = 14
LONG = 100
"""Words of a job whose worker is told to stop in the middle: it must not have ended before the signal is heard."""
AFTER_COUNT = {"stepped": 5, "heard": 5, "published": 5}
"""Reached at every step: the fifth time is in the middle."""
ON_STOP = {"checkpointed", "handed_back"}
IN_THE_MODEL_PROCESS = {"started", "stepped"}
QUICK = ("published",)


def every_failpoint() -> list[Any]:
    """Each, and what E07 is about on the other server too."""
    on_valkey = [
        pytest.param(name, ValkeyServer.kind, marks=() if name in QUICK else pytest.mark.long, id=name)
        for name in failpoints.NAMES
    ]
    return [*on_valkey, pytest.param("finished", DebianRedisServer.kind, marks=pytest.mark.long)]


@contextmanager
def stopped(worker: WorkerProcess) -> Iterator[None]:
    """A worker that waits, so that the other one gets the job."""
    worker.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.signal(signal.SIGCONT)


class Watching:
    """A client that follows a job from before its start to its end, across whatever happens to workers."""

    def __init__(self, url: str, job_id: str) -> None:
        self.events: list[AnyEvent] = []
        self._thread = threading.Thread(target=self._follow, args=(url, job_id), daemon=True)
        self._thread.start()

    def _follow(self, url: str, job_id: str) -> None:
        with queue_at(url) as queue:
            self.events = watch(queue, job_id)[1]

    def to_the_end(self) -> list[AnyEvent]:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the watcher heard of no end"
        return self.events


def die_at(name: str, queue: Queue, workers: Workers, model: str, *flags: str, count: int) -> WorkerProcess:
    """Start a worker, have it take what waits, and let it die where it is told to."""
    spent = workers.folder / name
    doomed = workers.start(*LEASE, *flags, model=model, failpoint=f"{name}:{count}:{spent}")
    if name in ON_STOP:
        until(lambda: logged(queue, "j") >= 5, "in the middle")
        doomed.signal(signal.SIGTERM)
        until(lambda: "stopping" in doomed.log, "told to stop")
        doomed.signal(signal.SIGTERM)
    until(spent.exists, f"{name} was reached")
    if name in IN_THE_MODEL_PROCESS:
        until(lambda: "the model process died" in doomed.log, "its parent has noticed")
        doomed.kill()
    assert doomed.wait() == -signal.SIGKILL
    return doomed


def assert_one_end(events: list[AnyEvent], stored: Result, queue: Queue) -> None:
    assert [event.type for event in events if event.type != "token"] == ["done"]
    assert stored.state == "succeeded"
    attempts = [event.attempt for event in events]
    assert attempts == sorted(attempts), "events of two attempts are mixed"
    assert queue.client.xlen(queue.keys.dead) == 0
    nothing_left(queue)


@pytest.mark.parametrize(("name", "server_kind"), every_failpoint())
def test_a_worker_killed_at_a_failpoint(queue: Queue, workers: Workers, name: str) -> None:
    """E03, E07. The two sides of E07, before and after the acknowledgement, are one moment: a script does both."""
    count = LONG if name in ON_STOP else SHORT
    rescuer = workers.start(*LEASE, model=MODEL).ready()
    with stopped(rescuer):
        submit(queue, "j", words(count), n=2)
        watching = Watching(workers.url, "j")
        die_at(name, queue, workers, MODEL, count=AFTER_COUNT.get(name, 1))
        log = queue.client.lrange(queue.keys.log("j"), 0, -1)
        stored_before = queue.client.get(queue.keys.result("j"))
        assert (stored_before is not None) == (name == "finished")
    events = watching.to_the_end()
    stored = result(queue, "j")
    assert [choice.text for choice in stored.choices] == [words(count)] * 2
    assert [choice.token_ids for choice in stored.choices] == [list(range(count))] * 2
    assert stored.attempt == (1 if name == "finished" else 2)
    assert_one_end(events, stored, queue)
    assert queue.client.lrange(queue.keys.log("j"), 0, -1)[: len(log)] == log, "what was logged stays"
    if stored_before is not None:
        submit(queue, "next", words(2))  # the rescuer has been through the queue once this has ended
        assert ended(queue, "next").text == words(2)
        assert queue.client.get(queue.keys.result("j")) == stored_before, "byte for byte"
        assert queue.run(calls.look(queue.keys, "j")).attempt == 1, "it did not run again"
        assert rescuer.process.poll() is None


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", list(failpoints.NAMES))
def test_a_worker_with_a_model_killed_at_a_failpoint(
    queue: Queue, workers: Workers, tiny_model_dir: Path, name: str
) -> None:
    """The text, the ids and the log-probabilities are those of an undisturbed run, in fp32."""
    model, flags = str(tiny_model_dir), ("--dtype", "float32")
    asked: dict[str, Any] = {"temperature": 0.9, "seed": 5, "n": 2, "logprobs": 2}
    asked |= {"max_tokens": 200 if name in ON_STOP else 60, "ignore_eos": True, "frequency_penalty": 0.5}
    rescuer = workers.start(*LEASE, *flags, model=model).ready()
    submit(queue, "undisturbed", "abcd efgh", **asked)
    undisturbed = ended(queue, "undisturbed")
    with stopped(rescuer):
        submit(queue, "j", "abcd efgh", **asked)
        watching = Watching(workers.url, "j")
        die_at(name, queue, workers, model, *flags, count=AFTER_COUNT.get(name, 1))
    events = watching.to_the_end()
    stored = result(queue, "j")
    assert [choice.text for choice in stored.choices] == [choice.text for choice in undisturbed.choices]
    for one, other in zip(stored.choices, undisturbed.choices, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert [told["logprob"] for told in one.logprobs] == pytest.approx(
            [told["logprob"] for told in other.logprobs], abs=1e-4
        )
    assert_one_end(events, stored, queue)


# -- the failpoints themselves ---------------------------------------------------------------------------------------


def test_every_failpoint_is_somewhere_in_the_worker() -> None:
    sources = "".join(path.read_text() for path in (Path(__file__).parents[2] / "worker").glob("*.py"))
    for name in failpoints.NAMES:
        assert f'"{name}"' in sources, f"nobody reaches {name}"


def run_armed(armed: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=os.environ | {failpoints.VARIABLE: armed, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )


REACH: Callable[[int], str] = (
    "from broker.failpoints import reached\nfor _ in range({}): reached('leased'); print('past', flush=True)".format
)


def test_the_process_dies_at_the_count_and_not_before(tmp_path: Path) -> None:
    died = run_armed("leased:3", REACH(5))
    assert (died.returncode, died.stdout.split()) == (-signal.SIGKILL, ["past"] * 2)
    assert run_armed("heard", REACH(5)).returncode == 0
    once = f"leased:1:{tmp_path / 'spent'}"
    assert run_armed(once, REACH(5)).returncode == -signal.SIGKILL
    assert run_armed(once, REACH(5)).returncode == 0, "with a file it dies once"


@pytest.mark.parametrize("armed", ["nowhere", "leased:soon", "leased:-1"])
def test_a_name_that_is_none_is_refused(armed: str) -> None:
    """Else a test that misspells it would show nothing."""
    refused = run_armed(armed, REACH(1))
    assert refused.returncode == 1
    assert "give name[:count[:file]] with one of leased, started" in refused.stderr
