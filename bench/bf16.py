"""A checkpoint in bfloat16, as most models are published.

A quantized GGUF file unpacks into float32 numbers that no published checkpoint has. All engines that read a folder
get them rounded, so that each may do with 16-bit weights what it does with those of its users.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def in_bfloat16(folder: Path) -> Path:
    """The copy of a checkpoint with its float32 weights rounded to bfloat16; made once, beside the folder."""
    target = folder.with_name(f"{folder.name}.bf16")
    if not target.exists():
        unfinished = target.with_name(f"{target.name}.{os.getpid()}")
        try:
            write_in_bfloat16(folder, unfinished)
            unfinished.replace(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return target


def write_in_bfloat16(source: Path, target: Path) -> None:
    """Copy a folder, its weights rounded and its config saying so."""
    target.mkdir()
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            weights = {name: _rounded(weight) for name, weight in load_file(file).items()}
            save_file(weights, target / file.name, metadata={"format": "pt"})
        elif file.name == "config.json":
            config = json.loads(file.read_text())
            config.pop("torch_dtype", None)
            (target / file.name).write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2))
        else:
            shutil.copyfile(file, target / file.name)


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16() if weight.dtype == torch.float32 else weight
