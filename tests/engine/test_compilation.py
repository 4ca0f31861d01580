"""Compiled layers give what eager ones give, from one graph for all layers and all batch sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from engine.interface import Chunk
from engine.loading import load_runner
from engine.model_runner import ModelRunner


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


@pytest.mark.long
def test_compiled_is_eager(tiny_model_dir: Path) -> None:
    eager = load_runner(str(tiny_model_dir), dtype="float32", device="cpu", compile=False).runner
    expected = steps(eager)
    counters.clear()
    compiled = load_runner(str(tiny_model_dir), dtype="float32", device="cpu", compile=True).runner
    graphs = counters["stats"]["unique_graphs"]
    for got, want in zip(steps(compiled), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    # One for a row alone, one for the rest; warming up has made both, so no request waits for a compiler.
    assert graphs == counters["stats"]["unique_graphs"] == 2
