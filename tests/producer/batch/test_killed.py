"""Batch workers that are killed at any moment: the files are those of an undisturbed `generate`."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from producer.batch import worker
from tests.producer.batch.setup import Bench
from tests.producer.bulk.orders import run, write_rows
from tests.producer.bulk.test_interrupted import slowly
from tests.producer.fake_worker import FakeWorker

KILLS = 10


def fork(url: str) -> int:
    """A batch worker in a child that needs no imports: kills then fall into the work and not before it. Its pid."""
    child = os.fork()
    if child == 0:
        try:
            worker.serve("default", url, None, burst=False)
        finally:
            os._exit(1)
    return child


@pytest.mark.long
def test_killed_at_any_moment_the_files_are_those_of_generate(bench: Bench, tmp_path: Path) -> None:
    rows = [{"custom_id": str(number), "prompt": f"row {number}"} for number in range(6000)]
    source = write_rows(tmp_path / "in.jsonl", [*rows, {"custom_id": "bad", "prompt": 3}])
    with FakeWorker(bench.url):
        run(source, tmp_path / "out.jsonl", bench.url)
    draw = random.Random(5)
    batch_id = bench.submit(source, window=50)
    with FakeWorker(bench.url, answer=slowly) as answers:
        for _ in range(KILLS):
            child = fork(bench.url)
            time.sleep(draw.uniform(0.05, 0.5))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            bench.status(batch_id)
        assert bench.status(batch_id) != "completed", "the kills came too late"
        bench.sweep()
        bench.work()
    assert bench.status(batch_id) == "completed"
    batch = bench.show(batch_id)
    assert Path(batch.output).read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    assert Path(batch.error_file).read_bytes() == (tmp_path / "out.errors.jsonl").read_bytes()
    assert len(answers.answered) == len(set(answers.answered)) == 6000


@pytest.mark.long
def test_rq_s_own_worker_works_on_batches(bench: Bench, tmp_path: Path) -> None:
    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", [{"prompt": "x"}]))
    program = Path(sys.executable).with_name("rq")
    command = [program, "worker", "-u", bench.url, "--serializer", "json", "--burst"]
    with FakeWorker(bench.url):
        done = subprocess.run(
            [*command, "millstream-batch-default"],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "REDIS_URL": bench.url},
        )
    assert done.returncode == 0, done.stderr
    assert bench.status(batch_id) == "completed"
