"""The models of `bench.gpu`: configs alone, their weights are random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GptOssConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config

WIDE = 0.3
"""Weights of the tiny models are drawn so wide: at 0.02 most tokens stay as they are when positions are wrong."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Where the parts run, and how large they are."""

    device: str
    dtype: torch.dtype
    sequences: int
    longest: int
    """Tokens of the longest prompt, and of the longest output."""
    large: PreTrainedConfig
    small: PreTrainedConfig
    batched_tokens: int


def full_scale() -> Scale:
    """What is measured on a GPU."""
    return Scale(
        device="cuda",
        dtype=torch.bfloat16,
        sequences=256,
        longest=1024,
        large=LlamaConfig(
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
        ),
        small=Qwen3Config(
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        ),
        batched_tokens=8192,
    )


def rehearsal() -> Scale:
    """The same code on a CPU within seconds."""
    tiny = tiny_models()
    return Scale(
        device="cpu",
        dtype=torch.float32,
        sequences=4,
        longest=12,
        large=tiny["llama"],
        small=tiny["qwen3"],
        batched_tokens=64,
    )


def tiny_models() -> dict[str, PreTrainedConfig]:
    """Plain; norms of heads; a window; windows in every other layer and sinks."""
    shape: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": WIDE,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return {
        "llama": LlamaConfig(**shape),
        "qwen3": Qwen3Config(**shape),
        "mistral": MistralConfig(**shape, sliding_window=40),
        "gpt-oss": GptOssConfig(**shape, **experts, sliding_window=40),
    }
