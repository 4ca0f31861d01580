"""Rows edited between two runs: what the queue still has of them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from broker import calls
from broker.connection import connect
from broker.keys import Keys
from broker.queue import Queue
from producer.bulk.generate import generate
from producer.bulk.interrupt import Interrupt
from protocol import Job
from tests.producer.bulk.orders import order, read_rows, write_rows
from tests.producer.fake_worker import FakeWorker, echo


def queue_rows(source: Path, output: Path, url: str, queue: Queue, rows: int) -> None:
    """Begin a run, and interrupt it once all of its rows wait."""
    interrupt = Interrupt()

    def begin() -> None:
        with pytest.raises(KeyboardInterrupt):
            generate(order(source, output, url), interrupt)

    run = threading.Thread(target=begin)
    run.start()
    while queue.run(calls.status(queue.keys)).waiting < rows:
        assert run.is_alive()
    interrupt._hear()
    run.join(20)


def test_jobs_of_rows_that_were_edited_or_taken_out_are_cancelled(url: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number}"} for number in range(5)]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    queue = Queue(connect(url), Keys("default"))
    queue_rows(source, output, url, queue, 5)
    queue.run(calls.submit(queue.keys, Job(id="run-of-another.2.0", prompt="theirs")))
    write_rows(source, [rows[0], {"prompt": "edited"}, *rows[2:4]])
    again = threading.Thread(target=generate, args=[order(source, output, url), Interrupt()])
    again.start()
    while len(queue.client.keys("*:job:*")) < 7:  # the five, the other run's, and the edited one
        assert again.is_alive()
    prompts: list[object] = []

    def noted(job: Job) -> str:
        prompts.append(job.prompt)
        return echo(job)

    with FakeWorker(url, answer=noted):
        again.join(20)
        while "theirs" not in prompts:
            pass
    assert [row["completion"] for row in read_rows(output)] == ["p0", "edited", "p2", "p3"]
    assert sorted(map(str, prompts)) == ["edited", "p0", "p2", "p3", "theirs"]
    left = {key for key in queue.client.scan_iter() if b":job:" in key or b":done:" in key}
    assert left == {queue.keys.job("run-of-another.2.0").encode()}
    queue.close()
