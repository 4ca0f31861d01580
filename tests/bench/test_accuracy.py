"""The figures of the accuracy report, against distributions whose figures are known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from bench.accuracy import OPTIONS, Sums, measure, tables
from engine import loading
from engine.attention import ReferenceBackend
from engine.attention.kv_dtype import KV_DTYPES
from engine.options import WORDS
from tests.models import save_tiny, tiny_config

P = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.25, 0.25, 0.5]])


def figures(q: torch.Tensor, answers: list[int]) -> dict[str, float]:
    sums = Sums()
    for row, answer in zip(range(len(P)), answers, strict=True):
        # Logits are known up to a constant.
        sums.add(P[row : row + 1].log(), q[row : row + 1].log() + 3, [answer])
    return sums.to_dict()


def test_the_reference_against_itself() -> None:
    assert figures(P, [0, 1, 0]) == {
        "tokens": 3,
        "agreement": 1.0,
        "kl": pytest.approx(0, abs=1e-6),
        "perplexity": pytest.approx((0.5 * 0.8 * 0.25) ** (-1 / 3)),
    }


def test_another_distribution() -> None:
    q = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1], [0.25, 0.25, 0.5]])
    found = figures(q, [0, 1, 2])
    assert found["agreement"] == pytest.approx(2 / 3)
    assert found["kl"] == pytest.approx((0.5 * math.log(2) + 0.25 * math.log(0.5)) / 3)
    assert found["perplexity"] == pytest.approx((0.25 * 0.8 * 0.5) ** (-1 / 3))


def test_the_table_has_a_row_an_option() -> None:
    found = {"tokens": 1672, "agreement": 0.917, "kl": -0.00001, "perplexity": 4.3291}
    table = tables({"model": "m.gguf", "rows": 12, "options": {"float32": found, "int8-kv": found}})[
        "accuracy"
    ]
    assert table.splitlines()[3] == "| int8-kv | 91.7% | 0.0000 | 4.329 |"
    assert table.endswith("1,672 answer tokens of 12 rows, m.gguf")


def test_every_option_of_the_engine_is_measured() -> None:
    named = {(key, value) for option in OPTIONS.values() for key, value in option.items()}
    assert {value for key, value in named if key == "kv_dtype"} == set(KV_DTYPES) - {"float32"}
    assert {value for key, value in named if key == "quantization"} == set(WORDS["quantization"]) - {"none"}


def test_options_are_measured_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the KV alone on the weights that the others have served; the last gives what the first gave.

    In plain torch: the kernel is compiled anew for each dtype.
    """
    monkeypatch.setattr(loading, "choose_backend", lambda *_: ReferenceBackend())
    config = tiny_config(num_hidden_layers=2, max_position_embeddings=1024)
    model = str(save_tiny(LlamaForCausalLM, tmp_path, config))
    asked = ["fp8-kv", "int8-weights-and-kv", "bfloat16-kv", "fp8-kv"]
    (_, own), *found = measure(model, 1, asked)
    assert [name for name, _ in found] == asked
    assert {figures["tokens"] for _, figures in found} == {own["tokens"]}
    assert own["kl"] == pytest.approx(0, abs=1e-6)
    fp8, int8, bfloat16, again = (figures["kl"] for _, figures in found)
    assert again == fp8
    assert 0 < bfloat16 < fp8
    assert int8 > 0
