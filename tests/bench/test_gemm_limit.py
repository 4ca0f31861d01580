"""The limit that matrix products set, from made-up rates, and that real layers can be timed."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from bench.gemm_limit import Products, measure
from bench.workload import Row

RATES = Products(sizes=(1, 2, 4), layers=(10.0, 12.0, 16.0), head=(1.0, 2.0, 4.0))


@pytest.mark.parametrize(
    ("tokens", "logits", "seconds"),
    [
        (1, 0, 10.0),
        (1, 1, 11.0),
        (3, 2, 14.0 + 2.0),
        (0, 0, 0.0),
        (8, 4, 32.0 + 4.0),  # beyond what was timed, in proportion
    ],
)
def test_a_step_lies_on_the_line_between_what_was_timed(tokens: int, logits: int, seconds: float) -> None:
    assert RATES.step(tokens, logits) == pytest.approx(seconds)


def test_steps_add_up() -> None:
    assert RATES.steps([(1, 1), (4, 0), [2, 2]]) == pytest.approx(11 + 16 + 14)


def test_a_perfect_schedule_computes_a_prefix_once_and_decodes_all_rows_together() -> None:
    rows = [Row([1, 2, 3], 1), Row([1, 2, 4], 3)]
    prompts = 4 * 16.0 / 4  # four nodes, at the best rate
    first = 2.0  # logits of two rows
    decodes = 2 * 11.0  # the second row's two others
    assert RATES.perfect(rows) == pytest.approx(prompts + first + decodes)
    assert RATES.perfect([Row([1], 1)]) == pytest.approx(4.0 + 1.0)


def test_the_layers_of_a_model_can_be_timed(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    found = measure(tmp_path, "float32", sizes=(1, 8), repeats=2)
    assert found.sizes == [1, 8]
    assert min([*found.layers, *found.head]) > 0
    assert found.layers[0] > found.head[0], "fourteen products take longer than one"
