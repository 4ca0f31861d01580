"""What a model is watched for before it is served. Whole architectures: `test_architectures.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from engine.attention import NAME
from engine.probe import mask_points, probe, window_of
from protocol import ModelUnavailable
from tests.models import tiny_config

CONFIG = {"sliding_window": 48, "attention_chunk_size": 33, "hidden_size": 64, "rope_theta": 1e4}


@pytest.mark.parametrize("max_model_len", [1, 2, 49, 4096])
@pytest.mark.parametrize("window", [1, 24, 47, 48, 49])
def test_the_window_is_read_off_the_mask(window: int, max_model_len: int) -> None:
    points = mask_points(CONFIG, max_model_len)
    seen = window_of(sliding_window_causal_mask_function(window), *points)
    assert seen == (window if window < max_model_len else None)
    assert window_of(causal_mask_function, *points) is None


def test_other_masks_are_told_apart() -> None:
    chunked = chunked_causal_mask_function(33, torch.zeros(1, dtype=torch.int64))
    for mask in (chunked, bidirectional_mask_function):
        with pytest.raises(ValueError):
            window_of(mask, *mask_points(CONFIG, 4096))
    assert window_of(chunked, *mask_points(CONFIG, 33)) is None, "one chunk is all there is"


def tiny(dtype: torch.dtype, changed: Any) -> Any:
    """A tiny Llama whose forward's keywords go through `changed`."""

    class Changed(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, **given: Any) -> Any:
            return super().forward(**changed(given))

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**tiny_config(attn_implementation=NAME, num_hidden_layers=2))
    return Changed._from_config(config, attn_implementation=NAME).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("forgotten", "said"),
    [("position_ids", "positions that it counts by itself"), ("logits_to_keep", "the logits of every row")],
)
def test_a_model_that_leaves_an_argument_aside_is_refused(
    dtype: torch.dtype, forgotten: str, said: str
) -> None:
    layers, width = probe(tiny(dtype, lambda given: given), 256)
    assert (len(layers), width) == (2, 512)
    with pytest.raises(ModelUnavailable, match=said):
        probe(tiny(dtype, lambda given: {k: v for k, v in given.items() if k != forgotten}), 256)


def test_the_mask_interface_is_left_as_it_was() -> None:
    probe(tiny(torch.float32, lambda given: given), 256)
    assert NAME not in transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
