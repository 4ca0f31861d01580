"""The architectures whose output is verified, each as a tiny model. `tests.models_page` makes a page of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ARRANGEMENTS = {
    "batch": "twelve prompts of 1 to 60 tokens in one batch",
    "chunks": "prompts computed a few tokens a step, in steps that decode others",
    "prefix": "prompts whose beginning is in the KV already, of the same prompt or of another one",
    "preempted": "too few KV blocks, so that running sequences lose theirs and are computed again",
}
LAYERS, WINDOW = 2, 8
BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
"""Wide random weights, not tied: else a few tokens repeat, whatever a fault does."""


@dataclass(frozen=True)
class Architecture:
    """A tiny model of one architecture: `BASE`, changed."""

    model_type: str
    class_name: str
    special: str
    """What sets it apart, and is active in the tiny model."""
    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    """Of the weights; chosen so that no two best logits lie so close that rounding decides."""


def moe(**changes: Any) -> dict[str, Any]:
    return {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2} | changes


MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24}
_CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}
_WINDOW = {"sliding_window": WINDOW}
_LAYERS = {"num_hidden_layers": 4}

VERIFIED = [
    Architecture(
        "afmoe",
        "AfmoeForCausalLM",
        "MoE, gated attention, window in 3 of 4 layers",
        moe(**_WINDOW, **_LAYERS, head_dim=16, moe_intermediate_size=32),
        seed=1,
    ),
    Architecture("apertus", "ApertusForCausalLM", "norms of queries and keys, xIELU"),
    Architecture("arcee", "ArceeForCausalLM", "squared ReLU"),
    Architecture("biogpt", "BioGptForCausalLM", "learned positions with an offset"),
    Architecture("bitnet", "BitNetForCausalLM", "norms inside attention and MLP"),
    Architecture(
        "codegen",
        "CodeGenForCausalLM",
        "interleaved qkv, part of a head rotated",
        {"n_positions": 256, "rotary_dim": 8},
    ),
    Architecture(
        "cohere",
        "CohereForCausalLM",
        "parallel residual, logits scaled, norms of queries and keys",
        {"logit_scale": 0.5, "use_qk_norm": True},
    ),
    Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        "window in 3 of 4 layers, no positions in the fourth",
        {**_WINDOW, **_LAYERS, "logit_scale": 0.5},
    ),
    Architecture("ctrl", "CTRLLMHeadModel", "sinusoidal positions", {"n_positions": 256, "dff": 64}),
    Architecture("cwm", "CwmForCausalLM", "window in 3 of 4 layers", {**_WINDOW, **_LAYERS, "head_dim": 16}),
    Architecture(
        "dbrx",
        "DbrxForCausalLM",
        "MoE, qkv in one and clipped",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": LAYERS,
            "max_seq_len": 256,
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        },
    ),
    Architecture(
        "deepseek_v2", "DeepseekV2ForCausalLM", "MLA (keys wider than values), MoE", {**MLA, **ROUTED}
    ),
    Architecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "MLA (keys wider than values), MoE with groups of experts",
        {**MLA, **ROUTED},
    ),
    Architecture("ernie4_5", "Ernie4_5ForCausalLM", "pairwise rotation", {"head_dim": 16}),
    Architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        "MoE from the second layer on",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    ),
    Architecture(
        "exaone4",
        "Exaone4ForCausalLM",
        "window in 3 of 4 layers, no positions in the fourth",
        {**_WINDOW, **_LAYERS, "sliding_window_pattern": 4},
    ),
    Architecture("flex_olmo", "FlexOlmoForCausalLM", "MoE, norms after the layers", moe()),
    Architecture("gemma", "GemmaForCausalLM", "heads wider than the hidden size", {"head_dim": 32}),
    Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        "softcaps of scores and logits, window in every other layer",
        {**_GEMMA, **_CAPS, **_WINDOW},
    ),
    Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        "window and rotation by layer, norms of queries and keys",
        {**_GEMMA, **_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    Architecture(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        "window by layer, embeddings for each layer, KV of an earlier layer in the last ones",
        {
            **_WINDOW,
            **_LAYERS,
            "head_dim": 16,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 512,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "intermediate_size": [64] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        "wider heads in the layers without a window",
        {
            **_WINDOW,
            **_LAYERS,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 512,
            "hidden_size_per_layer_input": 8,
        },
    ),
    Architecture("glm", "GlmForCausalLM", "half of a head rotated, pairwise", {"head_dim": 16}),
    Architecture("glm4", "Glm4ForCausalLM", "norms before and after each part", {"head_dim": 16}),
    Architecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        "MoE with a shared expert",
        {**ROUTED, "head_dim": 16, "use_qk_norm": True},
    ),
    Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        "learned positions, scores scaled by layer",
        {"n_positions": 256, "scale_attn_by_inverse_layer_idx": True},
    ),
    Architecture(
        "gpt_bigcode", "GPTBigCodeForCausalLM", "one key-value head, learned positions", {"n_positions": 256}
    ),
    Architecture(
        "gpt_neox", "GPTNeoXForCausalLM", "parallel residual, half of a head rotated", {"rotary_pct": 0.5}
    ),
    Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        "attention sinks, window in every other layer, MoE",
        moe(**_WINDOW, head_dim=16),
    ),
    Architecture(
        "gptj",
        "GPTJForCausalLM",
        "parallel residual, half of a head rotated",
        {"n_positions": 256, "rotary_dim": 8},
        seed=1,
    ),
    Architecture(
        "granite",
        "GraniteForCausalLM",
        "multipliers of scores, embeddings, residuals and logits",
        {
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "logits_scaling": 0.5,
        },
    ),
    Architecture(
        "granitemoe", "GraniteMoeForCausalLM", "MoE, multiplier of scores", moe(attention_multiplier=0.1)
    ),
    Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        "MoE with a shared expert (without Mamba layers)",
        moe(layer_types=["attention", "attention"], shared_intermediate_size=32),
    ),
    Architecture(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        "MoE with a shared expert",
        moe(attention_multiplier=0.1, shared_intermediate_size=32),
    ),
    Architecture("helium", "HeliumForCausalLM", "pairwise rotation", {"head_dim": 16}),
    Architecture(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        "norms of queries and keys after the rotation",
        {"head_dim": 16},
    ),
    Architecture(
        "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", "MoE", {"head_dim": 16, "num_experts": 4, "moe_topk": 2}
    ),
    Architecture("jais2", "Jais2ForCausalLM", "squared ReLU, layer norms"),
    Architecture("jetmoe", "JetMoeForCausalLM", "experts in attention too", moe(kv_channels=16)),
    Architecture("llama", "LlamaForCausalLM", ""),
    Architecture(
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        "sinks in layers with a window, keys wider than values, MoE",
        moe(
            **_WINDOW,
            head_dim=24,
            v_head_dim=16,
            moe_intermediate_size=32,
            layer_types=["full_attention", "sliding_attention"],
        ),
    ),
    Architecture("minicpm3", "MiniCPM3ForCausalLM", "MLA, scaled embeddings and residuals", MLA),
    Architecture(
        "minimax_m2", "MiniMaxM2ForCausalLM", "MoE, half of a head rotated", moe(head_dim=16, rotary_dim=8)
    ),
    Architecture("ministral", "MinistralForCausalLM", "window by layer", {**_WINDOW, "head_dim": 16}),
    Architecture("ministral3", "Ministral3ForCausalLM", "queries scaled by position", {"head_dim": 16}),
    Architecture("mistral", "MistralForCausalLM", "window", _WINDOW),
    Architecture("mixtral", "MixtralForCausalLM", "MoE, window", moe(**_WINDOW)),
    Architecture(
        "modernbert-decoder",
        "ModernBertDecoderForCausalLM",
        "window in every other layer",
        {**_LAYERS, "local_attention": WINDOW, "global_attn_every_n_layers": 2},
    ),
    Architecture("nanochat", "NanoChatForCausalLM", "norms without weights, softcap of logits"),
    Architecture("nemotron", "NemotronForCausalLM", "half of a head rotated, squared ReLU", {"head_dim": 16}),
    Architecture("olmo", "OlmoForCausalLM", "norms without weights, clipped qkv", {"clip_qkv": 1.0}),
    Architecture("olmo2", "Olmo2ForCausalLM", "norms after the layers, of queries and keys"),
    Architecture("olmo3", "Olmo3ForCausalLM", "window in 3 of 4 layers", {**_WINDOW, **_LAYERS}),
    Architecture("olmoe", "OlmoeForCausalLM", "MoE, norms of queries and keys", moe()),
    Architecture(
        "opt",
        "OPTForCausalLM",
        "learned positions with an offset, narrower embeddings",
        {"ffn_dim": 128, "word_embed_proj_dim": 32},
    ),
    Architecture("persimmon", "PersimmonForCausalLM", "qkv in one, norms of queries and keys, squared ReLU"),
    Architecture(
        "phi",
        "PhiForCausalLM",
        "parallel residual, half of a head rotated",
        {"partial_rotary_factor": 0.5},
        seed=2,
    ),
    Architecture("phi3", "Phi3ForCausalLM", "qkv in one, window", _WINDOW),
    Architecture("phimoe", "PhimoeForCausalLM", "MoE, window", {**_WINDOW, "num_local_experts": 4}),
    Architecture(
        "qwen2",
        "Qwen2ForCausalLM",
        "biases of qkv, window in the upper layers",
        {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "MoE with a shared expert",
        moe(moe_intermediate_size=32, shared_expert_intermediate_size=32),
        seed=1,
    ),
    Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        "norms of queries and keys, heads wider than the hidden size",
        {"head_dim": 32},
    ),
    Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "MoE",
        moe(head_dim=16, moe_intermediate_size=32, norm_topk_prob=True),
    ),
    Architecture("seed_oss", "SeedOssForCausalLM", "biases of qkv", {"head_dim": 16}),
    Architecture(
        "smollm3",
        "SmolLM3ForCausalLM",
        "no positions in every other layer",
        {**_LAYERS, "no_rope_layer_interval": 2},
    ),
    Architecture("solar_open", "SolarOpenForCausalLM", "MoE", {**ROUTED, "head_dim": 16}),
    Architecture(
        "stablelm",
        "StableLmForCausalLM",
        "part of a head rotated, norms by head, parallel residual",
        {"partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    Architecture("starcoder2", "Starcoder2ForCausalLM", "window, biases", _WINDOW),
    Architecture(
        "vaultgemma",
        "VaultGemmaForCausalLM",
        "softcaps, window in every other layer",
        {**_GEMMA, **_CAPS, **_WINDOW},
    ),
    Architecture("youtu", "YoutuForCausalLM", "MLA", MLA),
]
