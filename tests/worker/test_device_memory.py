"""A worker with a model whose device has too little memory: each thing that it does about it is a line of its log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker import calls
from broker.queue import Queue
from tests.worker.harness import WorkerProcess, Workers, ended, nothing_left, submit
from worker.restarts import MOST_DEVICES

pytestmark = pytest.mark.long

ROOM = """
import importlib.util
import sys

ROOM = {room}

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "engine.loading":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            load_engine = module.load_engine

            def load_and_shrink(*args, **options):
                engine = load_engine(*args, **options)
                from engine.model_runner import ModelRunner

                forward = ModelRunner.forward

                def failing(runner, chunks, *args):
                    if len(chunks) > ROOM:
                        import torch

                        raise torch.OutOfMemoryError("out of memory: asked for 2.00 GiB")
                    return forward(runner, chunks, *args)

                ModelRunner.forward = failing
                return engine

            module.load_engine = load_and_shrink

        spec.loader.exec_module = execute_and_patch
        return spec

sys.meta_path.insert(0, Finder())
"""
"""A `sitecustomize` under which, once the model is loaded, a step of more than `room` sequences does not fit."""
COUNT = 8


@pytest.fixture
def room(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many sequences fit into a step of the workers that are started from now on."""
    (tmp_path / "sitecustomize.py").write_text(ROOM.format(room=request.param))
    paths = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    room: int = request.param
    return room


def start_on_jobs(queue: Queue, workers: Workers, model: Path) -> WorkerProcess:
    """A worker that finds work for all of its slots."""
    for number in range(COUNT):
        submit(queue, f"j{number}", f"abcd {number}", max_tokens=12, ignore_eos=True, temperature=0)
    return workers.start("--dtype", "float32", "--max-num-seqs", str(COUNT), model=str(model))


@pytest.mark.parametrize("room", [3], indirect=True)
@pytest.mark.usefixtures("room")
def test_the_batch_shrinks_until_it_fits_and_no_job_is_the_worse_for_it(
    queue: Queue, workers: Workers, tiny_model_dir: Path
) -> None:
    worker = start_on_jobs(queue, workers, tiny_model_dir)
    results = [ended(queue, f"j{number}") for number in range(COUNT)]
    assert {(one.state, one.attempt, len(one.choices[0].token_ids)) for one in results} == {
        ("succeeded", 1, 12)
    }
    shrunk = [line for line in worker.log.splitlines() if "the device could not compute" in line]
    assert 1 <= len(shrunk) <= 2, "8 sequences, then 4, then 2"
    assert all("asked for 2.00 GiB" in line and "from now on" in line for line in shrunk)
    assert "Traceback" not in worker.log
    nothing_left(queue)


@pytest.mark.parametrize("room", [0], indirect=True)
@pytest.mark.usefixtures("room")
def test_where_nothing_fits_the_batch_shrinks_the_process_is_replaced_and_the_worker_gives_up(
    queue: Queue, workers: Workers, tiny_model_dir: Path
) -> None:
    """Each is a line; every job is handed back, and none is to blame."""
    worker = start_on_jobs(queue, workers, tiny_model_dir)
    assert worker.wait(400) == 1
    lines = worker.log.splitlines()
    assert sum("the device could not compute" in line for line in lines) >= MOST_DEVICES, (
        "8 sequences, then fewer"
    )
    ends = [line for line in lines if "has given up its device" in line]
    assert [f"{number} of {MOST_DEVICES} in a row" in line for number, line in enumerate(ends, 1)] == [
        True
    ] * 3
    assert lines[-1].startswith(f"millstream: {MOST_DEVICES} model processes ended in a row")
    assert "asked for 2.00 GiB" in lines[-1]
    assert "Traceback" not in worker.log
    for number in range(COUNT):
        assert queue.run(calls.look(queue.keys, f"j{number}")).state == "queued"
        assert queue.client.hget(queue.keys.job(f"j{number}"), "crashes") in (None, b"0")
    assert queue.run(calls.status(queue.keys)).workers == ()
