"""Fused decoder layers: equal to the originals, and in no place of a layer that computes anything else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from engine import loading, panel_linear
from engine.fused_layer import FusedLayer
from engine.interface import Chunk
from engine.loading import load_runner
from engine.model_runner import ModelRunner
from engine.panel_steps import PanelSteps
from engine.weights import Weights, load_weights
from tests.architectures import BASE
from tests.models import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

ON_CPU: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 4, "block_size": 8}
PROMPTS = [[3 + 7 * i % 500 for i in range(120)], [5, 9, 77], [41]]
TABLES = [list(range(16)), [16, 17], [18, 19]]


def weights(folder: Path, class_name: str, **config: Any) -> Weights:
    saved = save_tiny(getattr(transformers, class_name), folder, {**BASE, **config})
    return load_weights(
        str(saved),
        dtype="float32",
        device="cpu",
        revision=None,
        trust_remote_code=False,
        served_model_name=None,
    )


def fused_layers(model: nn.Module) -> int:
    return sum(isinstance(module, FusedLayer) for module in model.modules())


def logits(runner: ModelRunner) -> list[torch.Tensor]:
    """Prompts, their decodes, and decodes beside the chunk of a prompt."""
    prompts = [Chunk(ids, 0, table, len(ids)) for ids, table in zip(PROMPTS, TABLES, strict=True)]
    decodes = [Chunk([90 + i], len(ids), TABLES[i], 1) for i, ids in enumerate(PROMPTS)]
    chunk = Chunk([7, 8, 9], 121, TABLES[0], 3)
    later = Chunk([11], 4, TABLES[1], 1)
    return [runner.forward(prompts), runner.forward(decodes), runner.forward([chunk, later])]


@pytest.mark.parametrize(
    ("class_name", "config", "layers"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, 2),
        ("MistralForCausalLM", {"sliding_window": 8}, 2),
        ("Qwen2ForCausalLM", {}, 2),
        ("Qwen3ForCausalLM", {"head_dim": 16}, 2),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, 2),
        ("GemmaForCausalLM", {"head_dim": 16, "hidden_activation": "silu"}, 0),
        ("GraniteForCausalLM", {"residual_multiplier": 0.9}, 0),
        ("Olmo2ForCausalLM", {}, 0),
    ],
)
def test_the_plain_and_the_fused_model_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, class_name: str, config: dict[str, Any], layers: int
) -> None:
    fused = load_runner(weights(tmp_path, class_name, **config), **ON_CPU)
    monkeypatch.setattr(loading, "fuse_layers", lambda *_: 0)
    plain = load_runner(weights(tmp_path, class_name, **config), **ON_CPU)
    assert fused_layers(fused.weights.model) == layers
    assert fused_layers(plain.weights.model) == 0
    for got, want in zip(logits(fused.runner), logits(plain.runner), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def another_epsilon(layer: Any) -> None:
    norm = layer.input_layernorm
    other = copy.copy(norm)
    other.variance_epsilon = 2e-6
    norm.forward = other.forward


def rounded(found: Weights) -> Weights:
    """As of a bfloat16 checkpoint."""
    for parameter in found.model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("class_name", "config"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen3ForCausalLM", {"head_dim": 16}),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_layers_of_panels_are_equal_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, class_name: str, config: dict[str, Any], threads: int
) -> None:
    torch.set_num_threads(threads)
    monkeypatch.setattr(panel_linear, "panels_alone", lambda: True)
    fused = load_runner(rounded(weights(tmp_path, class_name, **config)), **ON_CPU)
    monkeypatch.setattr(loading, "fuse_layers", lambda *_: 0)
    plain = load_runner(rounded(weights(tmp_path, class_name, **config)), compile=False, **ON_CPU)
    assert all(layer._steps is not None for layer in fused.weights.model.model.layers)
    for got, want in zip(logits(fused.runner), logits(plain.runner), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    alone = fused.runner.forward([Chunk(PROMPTS[1], 0, TABLES[1], 3)])
    beside = fused.runner.forward(
        [
            Chunk(ids, 0, table, 3 if ids is PROMPTS[1] else 0)
            for ids, table in zip(PROMPTS, TABLES, strict=True)
        ]
    )
    assert torch.equal(alone, beside), "a prompt alone has other numbers than one beside others"


@pytest.mark.long
def test_rows_that_nobody_asks_for_are_left_out_of_the_last_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks inside a prompt, at its end, decodes, and prompts that want all their logits: not a bit changes."""
    monkeypatch.setattr(panel_linear, "panels_alone", lambda: True)
    loaded = load_runner(rounded(weights(tmp_path, "LlamaForCausalLM")), **ON_CPU)
    *others, last = loaded.weights.model.model.layers
    assert last.is_last
    assert not any(layer.is_last for layer in others)
    computed: list[int] = []
    after = PanelSteps.after
    monkeypatch.setattr(
        PanelSteps,
        "after",
        lambda steps, hidden, attended: computed.append(len(hidden)) or after(steps, hidden, attended),
    )

    def steps() -> list[torch.Tensor]:
        prompt, short, shorter = PROMPTS
        inside = loaded.runner.forward([Chunk(prompt[:100], 0, TABLES[0], 0)])
        mixed = [
            Chunk(prompt[100:], 100, TABLES[0], 1),
            Chunk(short, 0, TABLES[1], 3),
            Chunk(shorter, 0, TABLES[2], 1),
        ]
        decodes = [Chunk([90 + i], len(ids), TABLES[i], 1) for i, ids in enumerate(PROMPTS)]
        return [inside, loaded.runner.forward(mixed), loaded.runner.forward(decodes)]

    spared = steps()
    assert computed == [100, 0, 24, 5, 3, 3]
    last.is_last = False
    for got, want in zip(spared, steps(), strict=True):
        assert torch.equal(got, want)


def scaled(module: nn.Module, factor: float) -> None:
    compute = module.forward
    module.forward = lambda *args, **others: compute(*args, **others) * factor


def far_queries_scaled(layer: Any) -> None:
    """As Llama 4 does beyond the context it was made for."""
    turn = layer.self_attn.forward

    def forward(hidden_states: torch.Tensor, position_ids: torch.Tensor, **others: Any) -> Any:
        far = 1.0 + 0.1 * (position_ids >= 64)
        return turn(hidden_states=hidden_states * far[..., None], position_ids=position_ids, **others)

    layer.self_attn.forward = forward


def turned_back(layer: Any) -> None:
    turn = layer.self_attn.forward

    def forward(position_embeddings: Any, **others: Any) -> Any:
        cos, sin = position_embeddings
        return turn(position_embeddings=(cos, -sin), **others)

    layer.self_attn.forward = forward


ALTERED: dict[str, Callable[[Any], None]] = {
    "norm": lambda layer: scaled(layer.input_layernorm, 1.001),
    "epsilon": another_epsilon,
    "what is added": lambda layer: scaled(layer.mlp, 0.999),
    "activation": lambda layer: setattr(layer.mlp, "act_fn", nn.GELU()),
    "turned the other way": turned_back,
    "far positions": far_queries_scaled,
    "another module": lambda layer: layer.add_module("after", nn.Identity()),
}


@pytest.mark.parametrize("altered", ALTERED)
def test_a_layer_that_is_not_what_it_seems_stays(tmp_path: Path, altered: str) -> None:
    found = weights(tmp_path, "LlamaForCausalLM")
    layer = found.model.model.layers[1]
    ALTERED[altered](layer)
    loaded = load_runner(found, **ON_CPU)
    layers = loaded.weights.model.model.layers
    assert isinstance(layers[0], FusedLayer)
    assert layers[1] is layer
