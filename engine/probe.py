"""Whether a model can run on our attention, found out by running it once on two tokens."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from engine.attention import ProbedLayer, probing
from protocol import ModelUnavailable


def probe(model: PreTrainedModel) -> tuple[list[ProbedLayer], int]:
    """The model's attention modules in the order they run, and the width of its logits.

    An architecture that does not use transformers' attention interface ignores the hook without a word and
    would answer as if it had no past (bloom and falcon gave 0 of 4 right), so every layer must call it, once.

    Raises:
        ModelUnavailable: the model bypasses the hook, builds masks of its own, or keeps state beside keys
        and values.
    """
    config = model.config.get_text_config()
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    try:
        with torch.inference_mode(), probing() as seen:
            out = model(
                input_ids=tokens,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=torch.tensor([1], device=model.device),
            )
    except TypeError as error:
        raise _unsupported(model, f"its forward takes other arguments ({error})") from error
    layers = seen.layers
    if len(layers) != config.num_hidden_layers or len({id(layer.module) for layer in layers}) != len(layers):
        raise _unsupported(
            model, f"{len(layers)} of its {config.num_hidden_layers} layers use the attention interface"
        )
    if seen.saw_mask:
        raise _unsupported(model, "it builds attention masks of its own (position biases such as ALiBi)")
    if not all(getattr(layer.module, "is_causal", True) for layer in layers):
        raise _unsupported(model, "its attention is not causal")
    return layers, out.logits.shape[-1]


def context_length(model: PreTrainedModel, asked: int | None) -> int:
    """The most tokens a sequence may hold: what was asked for, else what the model was made for.

    Raises:
        ModelUnavailable: the model was not made for that many, or not for one fixed rotation of positions.
    """
    limit = _made_for(model)
    if asked is None:
        if limit is None:
            raise ModelUnavailable("the model's config names no context length: give --max-model-len")
        return limit
    if asked < 1:
        raise ModelUnavailable(f"--max-model-len is {asked}: give at least 1")
    if limit is not None and asked > limit:
        raise ModelUnavailable(
            f"--max-model-len is {asked}, and the model serves sequences of at most {limit} tokens"
        )
    return asked


def _made_for(model: PreTrainedModel) -> int | None:
    config = model.config.get_text_config()
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        # These stretch with the longest position of the batch: one sequence's output would depend on its neighbours.
        own = getattr(config, "original_max_position_embeddings", limit)
        limit = rope.get("original_max_position_embeddings", own)
    return limit


def _unsupported(model: PreTrainedModel, why: str) -> ModelUnavailable:
    return ModelUnavailable(f"{type(model).__name__} cannot run here: {why}")
