"""Linear layers in int8: exact in integers, a row the same alone and among others, and only where asked for."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from engine.int8_linear import Int8Linear
from engine.loading import load_engine, load_runner
from engine.packed_linear import PackedLinear, pack_linears
from protocol import OptionRefused, SamplingParams
from tests.architectures import BASE
from tests.models import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = [1, 2, 3, 4, 5, 8, 33]


def layer(width: int = 96, out: int = 80, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, out, bias=bias).requires_grad_(False)


def written_out(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Rounded as the layer says, then summed in float64."""
    weight_scale = linear.weight.abs().amax(1, keepdim=True) / 63
    row_scale = x.abs().amax(1, keepdim=True) / 127
    weight, rows = (linear.weight / weight_scale).round().double(), (x / row_scale).round().double()
    out = rows @ weight.T * weight_scale.double().T * row_scale.double()
    return out if linear.bias is None else out + linear.bias.double()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [True, False])
def test_sums_of_integers_are_exact(rows: int, bias: bool) -> None:
    linear, x = layer(bias=bias), torch.randn(rows, 96)
    got = Int8Linear(linear)(x)
    torch.testing.assert_close(got.double(), written_out(linear, x), rtol=1e-5, atol=1e-6)
    error = (got - linear(x)).norm() / linear(x).norm()
    assert 0 < error < 0.03


@pytest.mark.parametrize("rows", ROWS)
def test_largest_numbers_of_one_sign_do_not_overflow(rows: int) -> None:
    """Two products of bytes at their largest are added in 16 bits."""
    linear = layer(1536, 64, bias=False)
    linear.weight[:32], linear.weight[32:] = 0.5, -0.5
    x = torch.full((rows, 1536), 3.0)
    x[-1] = -3
    torch.testing.assert_close(Int8Linear(linear)(x), linear(x), rtol=1e-5, atol=0)


def test_a_row_is_the_same_alone_and_among_others_bit_for_bit() -> None:
    int8, x = Int8Linear(layer(576, 192)), torch.randn(70, 576) * torch.logspace(-3, 3, 70)[:, None]
    alone = torch.cat([int8(row[None]) for row in x])
    for rows in (2, 3, 4, 7, 32, 70):
        assert torch.equal(torch.cat([int8(part) for part in x.split(rows)]), alone)


def test_rows_of_zeros_and_of_no_numbers() -> None:
    linear, x = layer(), torch.randn(4, 96)
    x[0] = 0
    x[1, 5], x[2, 95] = math.nan, math.inf
    for rows in (x, torch.cat([x, x])):
        got = Int8Linear(linear)(rows)
        assert torch.equal(got[0], linear.bias)
        assert not got[1:3].isfinite().any()
        assert torch.equal(got[3], Int8Linear(linear)(x[3:])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_and_shapes(dtype: torch.dtype) -> None:
    linear = layer().to(dtype)
    x = torch.randn(2, 3, 96).to(dtype)
    got = Int8Linear(linear)(x)
    assert got.dtype == dtype
    assert got.shape == (2, 3, 80)
    torch.testing.assert_close(
        got.float(),
        nn.functional.linear(x.float(), linear.weight.float(), linear.bias.float()),
        atol=0.1,
        rtol=0.1,
    )


def test_what_has_little_to_gain_stays_as_it_is() -> None:
    net = nn.Sequential(layer(96, 64), layer(64, 8), layer(8, 40)).eval()
    assert pack_linears(net, lambda: net(torch.zeros(1, 96)), Int8Linear) == 1
    assert [type(part) for part in net] == [Int8Linear, nn.Linear, nn.Linear]


# A model

ON_CPU: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 96, "max_num_seqs": 4}
PROMPTS = [list(range(40, 60)), list(range(9, 12)), [5] * 33]


def test_a_model_answers_the_same_alone_and_among_others(tiny_model_dir: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    found = []
    for budget in (512, 5):
        engine = load_engine(
            str(tiny_model_dir), quantization="int8", max_num_batched_tokens=budget, block_size=8, **ON_CPU
        )
        assert engine.fingerprint.quantization == "int8"
        found.append([result.choices[0].token_ids for result in engine.generate(PROMPTS, params)])
        found.append([engine.generate([one], params)[0].choices[0].token_ids for one in PROMPTS])
    assert all(answers == found[0] for answers in found)
    kinds = {type(part) for part in load_runner(str(tiny_model_dir), **ON_CPU).weights.model.modules()}
    assert any(issubclass(kind, PackedLinear) for kind in kinds)
    assert Int8Linear not in kinds, "int8 is never the default"


def tiny(folder: Path, class_name: str, **config: Any) -> str:
    return str(save_tiny(getattr(transformers, class_name), folder, {**BASE, **config}))


@pytest.mark.parametrize(
    ("class_name", "config", "said"),
    [
        (
            "LlamaForCausalLM",
            {},
            "int8: 9 of 9 linear layers, 100 % of the layers' weights without embeddings and head (all)",
        ),
        (
            "GemmaForCausalLM",
            {"num_key_value_heads": 1, "head_dim": 16},
            "int8: 11 of 15 linear layers, 94 % of the layers' weights without embeddings and head "
            "(as they were: 4 narrow Linear)",
        ),
    ],
    ids=["all", "narrow"],
)
def test_the_log_says_how_much_is_int8(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, class_name: str, config: dict[str, Any], said: str
) -> None:
    with caplog.at_level(logging.INFO, logger="engine.int8_linear"):
        load_runner(tiny(tmp_path, class_name, **config), quantization="int8", **ON_CPU)
    assert [record.message for record in caplog.records if record.name == "engine.int8_linear"] == [said]


@pytest.mark.parametrize(
    ("class_name", "config", "said"),
    [
        (
            "GPT2LMHeadModel",
            {"n_positions": 256},
            r"1 of 1 linear layers, 0 % of .*\(as they were: 8 Conv1D\)",
        ),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 4, "num_experts_per_tok": 2},
            r"9 of 9 linear layers, \d+ % of .*\(as they were: 2 Mixtral\w+, 2 Mixtral\w+\)",
        ),
    ],
    ids=["Conv1D", "experts"],
)
def test_a_model_of_which_most_would_stay_as_it_is_is_refused(
    tmp_path: Path, class_name: str, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(
        OptionRefused, match=f"quantization int8 can replace too little of .*: {said}: give no quantization"
    ):
        load_runner(tiny(tmp_path, class_name, **config), quantization="int8", **ON_CPU)
