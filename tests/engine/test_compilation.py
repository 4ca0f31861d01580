"""Compiled layers give what eager ones give, from one graph for all layers and all batch sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from engine import compilation
from engine.compilation import CompileClock, compile_clock, compile_layers
from engine.interface import Chunk
from engine.loading import load_runner
from engine.model_runner import ModelRunner
from engine.packed_linear import PackedLinear


def is_packed(module: nn.Module) -> bool:
    return isinstance(module, PackedLinear)


def steps(runner: ModelRunner) -> list[torch.Tensor]:
    """Prefill, a mixed step, and decodes of several batch sizes."""
    tables = [[2 * index, 2 * index + 1] for index in range(5)]
    prompts = [[3 + (7 * i * (index + 1)) % 500 for i in range(9 + index)] for index in range(5)]
    out = [
        runner.forward(
            [Chunk(ids, 0, table, True) for ids, table in zip(prompts[:4], tables[:4], strict=True)]
        )
    ]
    mixed = [Chunk([40 + index], len(prompts[index]), tables[index], True) for index in range(4)]
    out.append(runner.forward([*mixed, Chunk(prompts[4], 0, tables[4], True)]))
    for size in (1, 3):
        decodes = [Chunk([90 + index], len(prompts[index]) + 1, tables[index], True) for index in range(size)]
        out.append(runner.forward(decodes))
    return out


def test_what_inductor_makes_is_kept_in_our_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compilation, "find_cxx", lambda: "c++")
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "where the user wants it")
    assert compile_layers(nn.Module(), [])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "where the user wants it"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert compile_layers(nn.Module(), [])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")


def test_a_compiler_inside_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 15.0, 20.0, 22.0])
    monkeypatch.setattr(compilation.time, "monotonic", lambda: next(ticks))
    clock = CompileClock()
    clock.on_start()
    clock.on_start()
    clock.on_end()
    clock.on_end()
    clock.on_start()
    clock.on_end()
    assert clock.seconds == 7.0


def test_what_numba_compiles_is_timed_and_a_second_call_is_not() -> None:
    double = numba.njit(lambda number: number * 2)
    with compile_clock() as first:
        assert double(4) == 8
    with compile_clock() as second:
        assert double(5) == 10
    assert first.seconds > 0
    assert second.seconds == 0


@pytest.mark.long
def test_compiled_is_eager(tiny_model_dir: Path) -> None:
    eager = load_runner(str(tiny_model_dir), dtype="float32", device="cpu", compile=False).runner
    expected = steps(eager)
    counters.clear()
    with compile_clock() as clock:
        loaded = load_runner(str(tiny_model_dir), dtype="float32", device="cpu", compile=True)
    compiled, linears = loaded.runner, [*filter(is_packed, loaded.weights.model.modules())]
    assert linears, "compiled layers have packed weights too"
    assert clock.seconds > 0
    graphs = counters["stats"]["unique_graphs"]
    for got, want in zip(steps(compiled), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    # One for a row alone, one for the rest; warming up has made both, so no request waits for a compiler.
    assert graphs == counters["stats"]["unique_graphs"] == 2


START = """
import json, sys
from torch._dynamo.utils import counters
from engine.loading import load_runner

load_runner(sys.argv[1], dtype="float32", device="cpu", compile=True)
print(json.dumps(counters["inductor"]))
"""


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_second_compiled_start_finds_its_code_on_disk(tiny_model_dir: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    starts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", START, str(tiny_model_dir)],
            env=environment | {"MILLSTREAM_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        starts.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = starts
    assert cold.get("fxgraph_cache_miss", 0) > 0
    assert warm.get("fxgraph_cache_miss", 0) == 0
    assert warm.get("fxgraph_cache_hit", 0) == cold["fxgraph_cache_miss"]
    assert any((tmp_path / "inductor").iterdir())
