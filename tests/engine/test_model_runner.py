"""A runner's step: nothing of it is left for another step or another runner, however it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine import panel_linear
from engine.attention import Backend, LayerCall
from engine.fused_layer import FusedLayer
from engine.interface import Chunk
from engine.loading import Loaded, load_runner
from engine.model_runner import ModelRunner
from engine.weights import Weights, load_weights
from tests.models import save_tiny, tiny_config

pytestmark = pytest.mark.usefixtures("one_thread")

ON_CPU: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "block_size": 8}
KINDS = ["layers of transformers", "fused", pytest.param("fused, of panels", marks=pytest.mark.long)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How layers are computed; panels are what a bfloat16 checkpoint becomes on a CPU without AVX-512."""
    monkeypatch.setattr(panel_linear, "panels_alone", lambda: True)
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama."""
    return save_tiny(LlamaForCausalLM, tmp_path, tiny_config(num_hidden_layers=2))


def weights(folder: Path, kind: str) -> Weights:
    found = load_weights(str(folder), dtype="float32", device="cpu")
    if kind == "fused, of panels":
        for parameter in found.model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    if kind == "layers of transformers":
        for layer in found.model.model.layers:
            layer.add_module("another", torch.nn.Identity())
    return found


def loaded(folder: Path, kind: str) -> Loaded:
    found = load_runner(weights(folder, kind), **ON_CPU)
    fused = [layer for layer in found.weights.model.modules() if isinstance(layer, FusedLayer)]
    assert len(fused) == (0 if kind == "layers of transformers" else 2)
    assert all((layer._steps is not None) == (kind == "fused, of panels") for layer in fused)
    return found


def steps(runner: ModelRunner) -> list[torch.Tensor]:
    """A prompt whose last row alone is asked for, a decode, and one prompt beside the decode that follows."""
    prompt, table = list(range(5, 25)), [1, 4, 2]
    return [
        runner.forward([Chunk(prompt, 0, table, 1)]),
        runner.forward([Chunk([30], 20, table, 1)]),
        runner.forward([Chunk([31], 21, table, 1), Chunk([7, 8, 9], 0, [0], 3)]),
    ]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_weights_are_loaded_again_and_serve_the_last_runner(folder: Path, kind: str) -> None:
    expected = steps(loaded(folder, kind).runner)
    first = loaded(folder, kind)
    assert_equal(steps(first.runner), expected)
    first.runner.forward([Chunk([5, 6], 0, [3], 1)])
    wider = load_runner(first.weights, **{**ON_CPU, "block_size": 16})
    torch.testing.assert_close(steps(wider.runner), expected, atol=1e-4, rtol=1e-4)
    second = load_runner(first.weights, **ON_CPU)
    assert_equal(steps(second.runner), expected)
    for runner in (first.runner, wider.runner):
        with pytest.raises(RuntimeError, match="the last one loaded"):
            steps(runner)
    assert_equal(steps(second.runner), expected)


class Failing:
    """A backend whose attention raises in one layer of a step."""

    def __init__(self, backend: Backend, layer: int, error: BaseException) -> None:
        self._attend, self._layer, self._error = backend.attend, layer, error
        self._calls = 0

    def attend(self, call: LayerCall) -> torch.Tensor:
        self._calls += 1
        if self._calls > self._layer:
            raise self._error
        return self._attend(call)


def test_a_step_that_raises_half_way_leaves_nothing_behind(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = loaded(folder, kind)
    expected = steps(found.runner)
    long_prompt = [Chunk(list(range(50)), 0, list(range(7)), 1)]
    backend = found.runner._attention.backend
    for error in (torch.OutOfMemoryError("no memory"), RuntimeError("device"), KeyboardInterrupt()):
        for layer in (0, 1):
            with monkeypatch.context() as patch:
                patch.setattr(backend, "attend", Failing(backend, layer, error).attend)
                with pytest.raises(type(error)):
                    found.runner.forward(long_prompt)
            assert found.runner._attention.answering is None
            assert_equal(steps(found.runner), expected)
    assert_equal(steps(load_runner(found.weights, **ON_CPU).runner), expected)


def test_a_layer_that_is_called_between_steps_is_not_answered(folder: Path, kind: str) -> None:
    found = loaded(folder, kind)
    steps(found.runner)
    with pytest.raises(RuntimeError, match="outside a step"), torch.inference_mode():
        found.weights.model(input_ids=torch.tensor([[5, 6]]), position_ids=torch.tensor([[0, 1]]))
