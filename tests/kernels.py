"""Compile the kernels that most tests need, once, before several processes share the tests.

Numba keeps what it has compiled beside the source. Processes that begin at once find nothing there and each compile
the same: about a minute of one core, three times. `make test` runs this first, where the engine is new or changed.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from transformers import LlamaForCausalLM

from engine.loading import load_runner
from engine.panel_linear import PanelLinear
from tests.models import save_tiny, tiny_recipe


def compile_kernels(folder: Path) -> None:
    """A model's warm-up calls attention, fused layers and linears; those of bfloat16 weights run here."""
    model = str(save_tiny(LlamaForCausalLM, folder, tiny_recipe()["config"]))
    for quantization in (None, "int8"):
        load_runner(model, dtype="float32", device="cpu", max_model_len=64, quantization=quantization)
    linear = nn.Linear(24, 40).eval()
    linear.weight.data = linear.weight.data.bfloat16().float()
    with torch.inference_mode():
        PanelLinear(linear)(torch.randn(1, 24))


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        compile_kernels(Path(folder))
