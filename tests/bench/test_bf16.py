"""A checkpoint and its copy in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.bf16 import in_bfloat16
from engine.panel_linear import is_bfloat16


def test_weights_are_rounded_and_all_else_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    weights = {"a": torch.tensor([[1 / 3, 1.0, -1e-20]]), "b": torch.tensor([7], dtype=torch.int64)}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text('{"hidden_size": 3, "torch_dtype": "float32"}')
    (source / "tokenizer.json").write_text("{}")
    copy = in_bfloat16(source)
    assert sorted(file.name for file in copy.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    rounded = load_file(copy / "model.safetensors")
    assert rounded["a"].dtype == torch.bfloat16
    assert is_bfloat16(rounded["a"].float())
    torch.testing.assert_close(rounded["a"].float(), weights["a"], rtol=2**-8, atol=0)
    assert torch.equal(rounded["b"], weights["b"])
    assert json.loads((copy / "config.json").read_text()) == {"hidden_size": 3, "dtype": "bfloat16"}
    assert in_bfloat16(source) == copy
    assert [path.name for path in tmp_path.iterdir() if path not in (source, copy)] == []
