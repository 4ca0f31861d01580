"""Processes that are killed in the middle of a batch: the files are those of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from producer.batch import asking, worker
from tests.producer.batch.setup import Bench
from tests.producer.bulk.orders import run, write_rows
from tests.producer.bulk.processes import wait_for
from tests.producer.bulk.test_interrupted import slowly
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program
from tests.servers import ValkeyServer
from tests.worker.harness import Workers

KILLS = 10
SLOW = "dry-run:echo?delay=8ms&slots=8"


def fork(url: str) -> int:
    """A batch worker in a child that needs no imports: kills then fall into the work and not before it. Its pid."""
    child = os.fork()
    if child == 0:
        try:
            worker.serve("default", url, None, burst=False)
        finally:
            os._exit(1)
    return child


def test_whether_a_batch_worker_works_is_known_at_once(
    bench: Bench, program: Program, tmp_path: Path
) -> None:
    alone = "no batch worker works on queue default yet: start `millstream batch-worker`"
    source = write_rows(tmp_path / "in.jsonl", [])
    submitted = program("batch", "submit", source)
    batch_id = submitted.stdout.strip()
    verbs = [("status", batch_id), ("status", batch_id, "--json"), ("list",)]
    assert alone in submitted.stderr
    assert all(alone in program("batch", *verb).stderr for verb in verbs)
    child = fork(bench.url)
    try:
        assert wait_for(lambda: bench.show(batch_id).has_ended, 30)
        assert bench.chain.is_worked_on()
        assert alone not in program("batch", "submit", source).stderr
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert wait_for(lambda: not bench.chain.is_worked_on(), 10), "though RQ still lists it"
    assert alone not in program("batch", "status", batch_id).stderr, "it has ended"


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


def server(server: ValkeyServer, _: Workers) -> None:
    server.restart()


def model_process(_: ValkeyServer, workers: Workers) -> None:
    workers.last.ready().model_process().kill()


def worker_with_model(_: ValkeyServer, workers: Workers) -> None:
    workers.last.kill()
    workers.start("--lease", "1", model=SLOW)


@pytest.mark.long
@pytest.mark.parametrize("kill", [server, model_process, worker_with_model])
def test_whoever_is_killed_the_files_are_those_of_an_undisturbed_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: Callable[[ValkeyServer, Workers], None]
) -> None:
    monkeypatch.setattr(worker, "SWEEP_EVERY_S", 1)
    monkeypatch.setattr(asking, "NOTE_EVERY_S", 0.0)  # so that it is seen early how far it is
    rows = [{"custom_id": str(number), "prompt": f"row {number}"} for number in range(600)]
    source = write_rows(tmp_path / "in.jsonl", [*rows, {"custom_id": "bad", "prompt": 3}])
    draw = random.Random(3)
    with ValkeyServer() as server, closing(Workers(server.url, tmp_path)) as workers:
        bench = Bench(server.url, tmp_path, monkeypatch)
        workers.start("--lease", "1", model=SLOW).ready()
        child = fork(server.url)
        try:
            undisturbed = bench.submit(source, window=50)
            assert wait_for(lambda: bench.show(undisturbed).has_ended, 60)
            disturbed = bench.submit(source, window=50)
            kills = 0
            while not bench.show(disturbed).has_ended:
                done = bench.show(disturbed).completed
                if kills < 4 and done >= 100 * kills:
                    time.sleep(draw.uniform(0.0, 0.2))
                    kill(server, workers)
                    kills += 1
                time.sleep(0.02)
            assert kills == 4
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        files = [
            (Path(batch.output).read_bytes(), Path(batch.error_file).read_bytes())
            for batch in map(bench.show, (undisturbed, disturbed))
        ]
        assert bench.status(disturbed) == "completed"
        bench.queue.close()
        bench.rq.close()
    assert files[0] == files[1]
    assert [file.count(b"\n") for file in files[0]] == [600, 1]
