"""Whether a model can run on our attention, found out at load by running it on a few tokens.

An architecture that bypasses transformers' attention interface ignores the hook without a word and would answer as
if it had no past (bloom and falcon gave 0 of 4 right). So it is watched, not believed:

    masks    with masks switched on: every layer calls the hook once, and the mask it would get is causal or a window
    rows     as in service: with each row seeing itself alone, its queries, keys, values and logits are the same
             whatever rows are beside it. With a convolution, a recurrent state or positions counted in the batch
             they are not
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from engine.attention import NAME, ProbedLayer, probing
from protocol import ModelUnavailable

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""transformers' own form: (batch, head, query position, key position) -> whether the query sees the key."""


def probe(model: PreTrainedModel, max_model_len: int) -> tuple[list[ProbedLayer], int]:
    """The model's attention modules in the order they run, and the width of its logits.

    Raises:
        ModelUnavailable: our attention could not give what the model's own would.
    """
    masks = _Masks(model, max_model_len)
    with masks.switched_on(), probing(masks):
        _logits(model, [0, 0], [0, 1])
    expected, layers = model.config.get_text_config().num_hidden_layers, masks.layers
    called = len({id(layer.module) for layer in layers})
    if not called:
        raise _unsupported(model, "its layers do not use transformers' attention interface")
    if called < expected:
        raise _unsupported(
            model,
            f"only {called} of its {expected} layers use transformers' attention interface (the others are "
            "recurrent, convolutions, or attention of their own)",
        )
    if len(layers) > expected:
        raise _unsupported(
            model,
            f"its {expected} layers call attention {len(layers)} times a pass, and each must have one KV",
        )
    return layers, _check_rows(model)


class _Masks:
    """Answers for attention with zeros, and notes for each layer what its mask would have shown it."""

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        self.layers: list[ProbedLayer] = []
        self._model = model
        self._points = mask_points(model.config.get_text_config().to_dict(), max_model_len)
        self._made: dict[int, tuple[torch.Tensor, MaskFunction]] = {}
        """By address: models hand a mask on as it is, or a slice of it."""

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """While open, models ask us for their masks."""
        AttentionMaskInterface.register(NAME, self._mask)
        try:
            yield
        finally:
            del AttentionMaskInterface._global_mapping[NAME]  # it has register and nothing that takes back

    def _mask(
        self, q_length: int, kv_length: int, mask_function: MaskFunction, device: Any = "cpu", **_: Any
    ) -> torch.Tensor:
        mask = torch.zeros(1, 1, q_length, kv_length, device=device)
        self._made[mask.data_ptr()] = mask, mask_function
        return mask

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """See `engine.attention.Probe`."""
        if not getattr(module, "is_causal", True):
            raise _unsupported(self._model, "its attention is not causal")
        # Some models have a window and do not pass it (PhiMoE), so the mask has the say, where one is made.
        window = sliding_window if attention_mask is None else self._window(attention_mask)
        self.layers.append(ProbedLayer(module, key.shape[1], key.shape[3], value.shape[3], window))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _window(self, mask: torch.Tensor) -> int | None:
        _, seen = self._made.get(mask.data_ptr(), (None, None))
        if seen is None:
            raise _unsupported(
                self._model, "it builds attention masks of its own (position biases such as ALiBi)"
            )
        try:
            return window_of(seen, *self._points)
        except (ValueError, IndexError) as error:
            raise _unsupported(
                self._model, "a layer's attention mask is neither causal nor a sliding window"
            ) from error


def window_of(seen: MaskFunction, rows: torch.Tensor, columns: torch.Tensor) -> int | None:
    """The sliding window of a mask; None: it is causal and nothing more.

    Args:
        rows: `[R, 1]` int64, positions of queries, the last one the largest.
        columns: `[R, C]` int64, positions of keys to look up for each.

    Raises:
        ValueError: it is neither.
    """
    zero = torch.zeros((), dtype=torch.int64)
    shown = seen(zero, zero, rows, columns).expand(columns.shape)
    reach = int((rows - columns + 1)[shown].max())
    expected = (columns <= rows) & (rows - columns < reach)
    if not torch.equal(shown, expected):
        raise ValueError
    return None if reach > int(rows[-1]) else reach


def mask_points(config: dict[str, Any], max_model_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where masks are looked at: around every distance that a number in the config can stand for."""
    numbers = {number for number in config.values() if type(number) is int and 0 < number < max_model_len}
    distances = {0, max_model_len - 1} | numbers | {number // 2 for number in numbers}
    near = torch.tensor(sorted({distance + step for distance in distances for step in (-1, 0, 1)}))
    rows = near[(near >= 0) & (near < max_model_len)][:, None]
    columns = torch.cat([near.expand(len(rows), -1), rows - near], dim=1)
    return rows, columns.clamp(0, max_model_len - 1)


class _RowsAlone:
    """Answers for attention as if each row saw itself alone, and keeps what came in."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.seen: list[torch.Tensor] = []
        """`[T, heads * size]` float32: queries, keys and values of each layer."""

    def attend(
        self,
        module: nn.Module,  # noqa: ARG002
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None,  # noqa: ARG002
    ) -> torch.Tensor:
        """See `engine.attention.Probe`."""
        if attention_mask is not None:
            raise _unsupported(
                self._model, "it builds attention masks of its own (position biases such as ALiBi)"
            )
        self.seen += [part[0].transpose(0, 1).flatten(1).float() for part in (query, key, value)]
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2).contiguous()


def _check_rows(model: PreTrainedModel) -> int:
    """Check that nothing but attention mixes rows; returns the width of the logits."""
    positions, order = [0, 1, 2, 0, 1], [4, 2, 0, 1]
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    # In 16 bits a near tie of a router may turn with the shape of the batch: once in three it must come out right.
    for first_id in (3, 20, 40):
        tokens = [first_id + row for row in range(len(positions))]
        together = _rows(model, tokens, positions)
        other = _rows(model, [tokens[row] for row in order], [positions[row] for row in order])
        # `not >`: where 16 bits overflow, both are NaN.
        if not any(
            (a[order] - b).norm() > tolerance * b.norm() for a, b in zip(together, other, strict=True)
        ):
            return together[-1].shape[-1]
    raise _unsupported(
        model,
        "a row of a batch changes with the rows beside it, attention left out (a convolution, a recurrent state, "
        "or positions that it counts by itself)",
    )


def _rows(model: PreTrainedModel, tokens: list[int], positions: list[int]) -> list[torch.Tensor]:
    """What each row has in every layer, and its logits at last; `[T, ...]` each."""
    alone = _RowsAlone(model)
    with probing(alone):
        logits = _logits(model, tokens, positions)
    return [*alone.seen, logits]


@torch.inference_mode()
def _logits(model: PreTrainedModel, tokens: list[int], positions: list[int]) -> torch.Tensor:
    """`[T, V]` float32, called exactly as the runner calls it."""
    # Backwards and twice: a model that leaves the argument aside is seen by the shape.
    rows = torch.arange(len(tokens), device=model.device).flip(0).repeat(2)
    try:
        out = model(
            input_ids=torch.tensor([tokens], device=model.device),
            position_ids=torch.tensor([positions], device=model.device),
            use_cache=False,
            logits_to_keep=rows,
        )
    except (TypeError, AttributeError, NotImplementedError) as error:
        raise _unsupported(
            model, f"its forward takes other arguments, or needs a mask or a cache ({error})"
        ) from error
    logits: torch.Tensor = out.logits[0].float()
    if len(logits) != len(rows):
        raise _unsupported(model, "it computes the logits of every row, whatever rows are asked for")
    return logits[: len(tokens)].flip(0)


def context_length(model: PreTrainedModel) -> int | None:
    """The most tokens a sequence may hold, as long as positions do not depend on the batch; None: it does not say."""
    config = model.config.get_text_config()
    limit: int | None = getattr(config, "max_position_embeddings", None)
    own: int | None = getattr(config, "original_max_position_embeddings", limit)
    rope = getattr(config, "rope_parameters", None) or {}
    # One rotation for all layers, or one for each kind of layer.
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if kind.get("rope_type") in ("dynamic", "longrope"):
            # These stretch with the batch's longest position: a sequence's output would depend on its neighbours.
            limit = kind.get("original_max_position_embeddings", own)
    return limit


def _unsupported(model: PreTrainedModel, why: str) -> ModelUnavailable:
    return ModelUnavailable(f"{type(model).__name__} cannot run here: {why}")
