"""Compile the kernels that most tests need, once, before several processes share the tests.

Numba keeps what it has compiled beside the source. Processes that begin at once find nothing there and each compile
the same: about a minute of one core, three times. `make test` runs this first, where the engine is new or changed.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch import nn
from transformers import LlamaForCausalLM

from engine import upper_halves
from engine.loading import load_runner
from engine.upper_halves import FEW_ROWS, HalvedLinear
from tests.models import save_tiny, tiny_recipe


def compile_kernels(folder: Path) -> None:
    """A model's warm-up calls attention, fused layers and int8 linears; linears of bfloat16 weights run here."""
    model = str(save_tiny(LlamaForCausalLM, folder, tiny_recipe()["config"]))
    for quantization in (None, "int8"):
        load_runner(model, dtype="float32", device="cpu", max_model_len=64, quantization=quantization)
    for alone in (False, True):
        with patch.object(upper_halves, "panels_alone", lambda alone=alone: alone), torch.inference_mode():
            halved = HalvedLinear(nn.Linear(24, 40).eval())
            for rows in (1, FEW_ROWS, 2 * FEW_ROWS):
                halved(torch.randn(1, rows, 24))


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        compile_kernels(Path(folder))
