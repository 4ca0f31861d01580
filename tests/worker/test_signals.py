"""Signals that reach more than the worker: service managers send theirs to every process of a service."""

from __future__ import annotations

import signal

import psutil
import pytest

from broker.queue import Queue
from tests.processes import still_alive
from tests.worker.harness import Workers, logged, result, submit, until, words


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
@pytest.mark.parametrize("first", ["model process", pytest.param("worker", marks=pytest.mark.long)])
def test_a_signal_to_the_model_process_too_is_a_drain_all_the_same(
    queue: Queue, workers: Workers, number: int, first: str
) -> None:
    """What runs is finished by the process that runs it, and counts neither as crashed nor as tried again."""
    worker = workers.start().ready()
    model_process = worker.model_process()
    submit(queue, "j", words(20))
    until(lambda: logged(queue, "j") >= 3, "started")
    sending = [lambda: model_process.send_signal(number), lambda: worker.signal(number)]
    for send in sending if first == "model process" else reversed(sending):
        send()
    assert worker.wait() == 0
    stored = result(queue, "j")
    assert (stored.text, stored.attempt) == (words(20), 1)
    assert "died" not in worker.log


@pytest.mark.long
def test_a_signal_while_the_model_loads_is_the_workers_too(workers: Workers) -> None:
    worker = workers.start()
    until(lambda: "loading" in worker.log, "its model process is started")
    for process in (worker.model_process(), worker.process):
        process.send_signal(signal.SIGTERM)
    assert worker.wait(10) == 0


@pytest.mark.long
def test_a_model_process_that_hangs_while_it_loads_does_not_outlive_its_worker(workers: Workers) -> None:
    """It does not notice that its pipe closes, so it is killed."""
    worker = workers.start()
    children = psutil.Process(worker.process.pid).children
    # Before that it is a fork that its parent waits for (vfork): both would stand still.
    until(
        lambda: any("worker.child" in child.cmdline() for child in children()),
        "its model process runs its own program",
    )
    model_process = worker.model_process()
    model_process.suspend()
    worker.signal(signal.SIGTERM)
    assert worker.wait(20) == 0
    assert not still_alive([model_process], 5.0)
