"""Decoder layers that `FusedLayer` can do the work of: found by their shape, believed once both give the same.

Models of a dozen names have Llama's modules and differ in what no shape tells: a norm that adds 1 to its weight, a
factor on what is added, a layer without positions, scores scaled from some position on. So each layer and its
replacement get the same random rows at positions all over the context. Where queries, keys, values or outputs differ
by more than float32 rounds, the layer stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.attention import LayerCall, PagedAttention, ProbedLayer, Scores
from engine.compilation import decoder_layers
from engine.fused_layer import FusedLayer
from engine.probe import mask_points

_TOLERANCE = 1e-4
"""Of what a layer adds to a row. Sums of some thousand products in another order differ by 1e-6 to 1e-5."""
_ROUNDING = 1e-6
"""Of the row itself, to which that is added."""
_SIZES = (0.01, 0.1, 1.0, 10.0)
"""Of the rows: a small one shows what a norm adds to the mean of squares."""

_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_GATED = {"gate_proj", "up_proj", "down_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}

Positions = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, `[1, T, R]` each."""


@torch.inference_mode()
def fuse_layers(
    model: PreTrainedModel, layers: list[ProbedLayer], attention: PagedAttention, max_model_len: int
) -> None:
    """Replace decoder layers that are bound to their KV by fused ones, which are then.

    Weights that nothing else holds are given up once they are merged.

    Args:
        model: in evaluation mode, its linear layers not packed yet.
        layers: in the order they run.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return
    names = {id(module): name for name, module in model.named_modules()}
    holders = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    probed = {id(layer.module): layer for layer in layers}
    fit = [layer for layer in decoder_layers(model, layers) if has_shape(layer)]
    with _alone(attention) as calls:
        arguments = _arguments(model, fit, max_model_len)
        for layer in fit:
            new = _replacement(layer, probed[id(layer.self_attn)], attention, calls, arguments.get(id(layer)))
            if new is not None:
                new.is_last = layer.self_attn is layers[-1].module
                model.set_submodule(names[id(layer)], new)
                _give_up(layer, new, holders)


def settle_layers(model: nn.Module) -> int:
    """Tell fused layers that the linear layers are packed; returns how many layers are fused."""
    fused = [module for module in model.modules() if isinstance(module, FusedLayer)]
    for layer in fused:
        layer.settle()
    return len(fused)


def has_shape(layer: Any) -> bool:
    """Whether a decoder layer has the modules of Llama's, maybe norms of its heads, and no others."""
    if {name for name, _ in layer.named_children()} != _LAYER:
        return False
    attention, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
    linears = [attention.get(name) for name in _PROJECTIONS] + [mlp.get(name) for name in _GATED]
    return (
        all(type(linear) is nn.Linear for linear in linears)
        and attention.keys() - _PROJECTIONS in (set(), _HEAD_NORMS)
        and mlp.keys() - _GATED <= {"act_fn"}
        and all(getattr(norm, "weight", None) is not None for norm in _norms(layer, attention))
    )


def _norms(layer: Any, attention: dict[str, nn.Module]) -> list[nn.Module]:
    of_heads = [attention[name] for name in _HEAD_NORMS & attention.keys()]
    return [layer.input_layernorm, layer.post_attention_layernorm, *of_heads]


class _Alone:
    """A backend to which each row sees itself alone, and that keeps what it is asked."""

    def __init__(self) -> None:
        self.last: LayerCall | None = None

    def attend(self, call: LayerCall) -> torch.Tensor:
        """See `Backend.attend`."""
        self.last = call
        return call.value.repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)


@contextmanager
def _alone(attention: PagedAttention) -> Iterator[_Alone]:
    """While open, the model's attention is answered so."""
    alone = _Alone()
    with attention.answered_by(alone):
        yield alone


def _arguments(model: PreTrainedModel, layers: list[Any], max_model_len: int) -> dict[int, dict[str, Any]]:
    """What the model hands each layer beside rows, of one pass at positions all over the context."""
    found = {}

    def note(layer: nn.Module, rows: tuple[Any, ...], others: dict[str, Any]) -> None:
        if len(rows) == 1:
            found[id(layer)] = others

    positions, _ = mask_points(model.config.get_text_config().to_dict(), max_model_len)
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        if layers:
            model(
                input_ids=torch.zeros_like(positions.T),
                position_ids=positions.T,
                use_cache=False,
                logits_to_keep=positions.new_zeros(1),
            )
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _replacement(
    layer: Any,
    probed: ProbedLayer,
    attention: PagedAttention,
    alone: _Alone,
    arguments: dict[str, Any] | None,
) -> FusedLayer | None:
    """What may take a layer's place, bound as it is; None: nothing does the same."""
    positions: Any = (arguments or {}).get("position_embeddings")
    if arguments is None or probed.key_dim != probed.value_dim or not _rotates(positions, probed.key_dim):
        return None
    rows = _rows(positions[0].shape[1], layer.self_attn.q_proj.in_features)
    expected = layer(rows, **arguments)
    asked = alone.last
    if asked is None or not isinstance(expected, torch.Tensor):
        return None
    scores = Scores(asked.scaling, asked.softcap, asked.sinks)
    new = FusedLayer(layer, probed.key_dim, probed.kv_heads, scores)
    attention.bind(replace(probed, module=new), asked.key_blocks, asked.value_blocks)
    for new.rotated in (True, False):
        found = new(rows, **arguments)
        if _same_call(alone.last, asked) and _close(found - rows, expected - rows, rows):
            return new
    return None


def _rotates(positions: Any, head_dim: int) -> bool:
    """Whether a layer is handed cosines and sines, `[1, T, R]`, for the first R numbers of a head."""
    if not isinstance(positions, tuple) or len(positions) != 2:
        return False
    return all(
        part.shape == positions[0].shape and part.dtype == torch.float32 and part.dim() == 3
        and part.shape[0] == 1 and part.shape[2] <= head_dim and part.shape[2] % 2 == 0
        for part in positions
    )  # fmt: skip


def _rows(count: int, size: int) -> torch.Tensor:
    """`[1, count, size]`: the same random rows at each start."""
    drawn = torch.randn(1, count, size, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor(_SIZES).repeat(-(-count // len(_SIZES)))[:count]
    return drawn * sizes[None, :, None]


def _same_call(one: LayerCall | None, other: LayerCall) -> bool:
    return one is not None and all(
        _close(a, b, b)
        for a, b in zip((one.query, one.key, one.value), (other.query, other.key, other.value), strict=True)
    )


def _close(found: torch.Tensor, expected: torch.Tensor, beside: torch.Tensor) -> bool:
    """Whether each row differs by rounding alone. `<=`: what is no number is not close."""
    far = (found - expected).flatten(2).norm(dim=-1)
    near = _TOLERANCE * expected.flatten(2).norm(dim=-1) + _ROUNDING * beside.flatten(2).norm(dim=-1)
    return found.shape == expected.shape and bool((far <= near).all())


def _give_up(layer: Any, new: FusedLayer, holders: Counter[int]) -> None:
    """The weights of a replaced layer that are in the new one in another form, unless others hold them."""
    kept = {id(parameter) for parameter in new.parameters()}
    for linear in layer.modules():
        if type(linear) is nn.Linear and id(linear.weight) not in kept and holders[id(linear.weight)] == 1:
            linear.weight.data = linear.weight.data.new_empty(0)
