"""Architectures that cannot be right here, and what is said when they are loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.architectures import LAYERS, MLA, ROUTED, moe


@dataclass(frozen=True)
class Refused:
    """An architecture that is refused when it is loaded."""

    model_type: str
    class_name: str
    reason: str
    """For people."""
    said: str
    """Part of the message."""
    config: dict[str, Any] = field(default_factory=dict)


_INTERFACE = "attention of its own, not through transformers' attention interface"
_RECURRENT = "recurrent or convolution layers: state beside keys and values"
_BYPASSES = "do not use transformers' attention interface"
_COUNTS = "positions that it counts by itself"

REFUSED = [
    Refused(
        "bart",
        "BartForCausalLM",
        f"made as the decoder of an encoder-decoder; {_COUNTS}",
        "changes with the rows beside it",
        {"d_model": 64, "decoder_layers": LAYERS, "decoder_attention_heads": 4, "decoder_ffn_dim": 64},
    ),
    Refused(
        "t5",
        "T5ForConditionalGeneration",
        "encoder-decoder",
        "encoder-decoder",
        {"num_layers": 2, "d_model": 64, "num_heads": 4},
    ),
    Refused("bert", "BertLMHeadModel", "bidirectional, unless it was saved as a decoder", "is not causal"),
    Refused("bloom", "BloomForCausalLM", f"ALiBi; {_INTERFACE}", _BYPASSES),
    Refused("falcon", "FalconForCausalLM", _INTERFACE, _BYPASSES),
    Refused(
        "mpt",
        "MptForCausalLM",
        f"ALiBi; {_INTERFACE}",
        _BYPASSES,
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    ),
    Refused(
        "gpt_neo",
        "GPTNeoForCausalLM",
        _INTERFACE,
        _BYPASSES,
        {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    ),
    Refused("xglm", "XGLMForCausalLM", _INTERFACE, _BYPASSES, {"ffn_dim": 64}),
    Refused(
        "mamba",
        "MambaForCausalLM",
        _RECURRENT,
        _BYPASSES,
        {"state_size": 4},
    ),
    Refused("rwkv", "RwkvForCausalLM", _RECURRENT, _BYPASSES),
    Refused(
        "lfm2",
        "Lfm2ForCausalLM",
        _RECURRENT,
        "1 of its 2 layers",
        {"layer_types": ["conv", "full_attention"]},
    ),
    Refused(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _RECURRENT,
        "1 of its 2 layers",
        moe(head_dim=16, moe_intermediate_size=32, layer_types=["linear_attention", "full_attention"]),
    ),
    Refused(
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        _RECURRENT,
        "of its 3 layers",
        {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 8},
    ),
    Refused(
        "jamba",
        "JambaForCausalLM",
        _RECURRENT,
        "1 of its 2 layers",
        moe(
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=4,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
    ),
    Refused(
        "falcon_h1",
        "FalconH1ForCausalLM",
        _RECURRENT,
        "changes with the rows beside it",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "head_dim": 16},
    ),
    Refused("minimax", "MiniMaxForCausalLM", _RECURRENT, "1 of its 2 layers", moe()),
    Refused(
        "llama4_text",
        "Llama4ForCausalLM",
        "attention in chunks of the text",
        "neither causal nor a sliding window",
        {
            "head_dim": 16,
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 64,
        },
    ),
    Refused("doge", "DogeForCausalLM", "masks that depend on the values", "attention masks of its own"),
    Refused(
        "deepseek_v32",
        "DeepseekV32ForCausalLM",
        "sparse attention, chosen by an indexer",
        "its forward takes other arguments, or needs a mask",
        {**MLA, **ROUTED},
    ),
    Refused("diffllama", "DiffLlamaForCausalLM", "two attentions a layer", "call attention 4 times"),
]
