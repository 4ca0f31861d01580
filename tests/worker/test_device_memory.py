"""A worker with a model whose device has too little memory: each thing that it does about it is a line of its log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.queue import Queue
from tests.worker.harness import Workers, ended, nothing_left, submit

pytestmark = pytest.mark.long

ROOM_FOR_THREE = """
import importlib.util
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "engine.model_runner":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_patch(module):
            load(module)
            forward = module.ModelRunner.forward

            def failing(runner, chunks, *args):
                if len(chunks) > 3:
                    import torch

                    raise torch.OutOfMemoryError("out of memory: asked for 2.00 GiB")
                return forward(runner, chunks, *args)

            module.ModelRunner.forward = failing

        spec.loader.exec_module = load_and_patch
        return spec

sys.meta_path.insert(0, Finder())
"""
"""A `sitecustomize` under which a step of more than three sequences does not fit; loading tries three."""
COUNT = 8


def test_the_batch_shrinks_until_it_fits_and_no_job_is_the_worse_for_it(
    queue: Queue, workers: Workers, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ROOM_FOR_THREE)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    )
    for number in range(COUNT):
        submit(queue, f"j{number}", f"abcd {number}", max_tokens=12, ignore_eos=True, temperature=0)
    worker = workers.start("--dtype", "float32", "--max-num-seqs", "8", model=str(tiny_model_dir))
    results = [ended(queue, f"j{number}") for number in range(COUNT)]
    assert {(one.state, one.attempt, len(one.choices[0].token_ids)) for one in results} == {
        ("succeeded", 1, 12)
    }
    shrunk = [line for line in worker.log.splitlines() if "the device could not compute" in line]
    assert 1 <= len(shrunk) <= 2, "8 sequences, then 4, then 2"
    assert all("asked for 2.00 GiB" in line and "from now on" in line for line in shrunk)
    assert "Traceback" not in worker.log
    nothing_left(queue)
