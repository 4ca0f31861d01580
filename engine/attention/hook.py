"""How transformers' modules reach our attention.

    LlamaAttention.forward ... -> AttentionInterface["millstream"] -> millstream::paged_attention -> backend

The modules stay transformers' own. They are loaded with `attn_implementation="millstream"`; the name is
registered as an attention function but not as a mask, so models build none. Each attention module carries
its blocks and a handle as attributes, never its layer number: then one compiled graph serves all layers. The
op hides the step's layout (block tables, lengths) from the graph, so the backend behind it is
interchangeable.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from engine.attention.backend import Backend, LayerCall
from engine.attention.batch import PackedBatch

NAME = "millstream"

_handles = itertools.count(1)
_bound: weakref.WeakValueDictionary[int, PagedAttention] = weakref.WeakValueDictionary()
"""The op takes tensors and numbers, so it finds its engine by number. Weak: a dropped engine frees its KV."""


class PagedAttention:
    """The attention of one loaded model: which modules call it, and the backend that answers."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.answering: Answering | None = None
        """While the model computes. None in between: nothing of a step outlives it, also one that raised."""
        self._handle = next(_handles)
        _bound[self._handle] = self

    def bind(self, layer: ProbedLayer, key_blocks: torch.Tensor, value_blocks: torch.Tensor) -> None:
        """Give an attention module its part of the KV store, `[blocks, N, block_size, D]` each, and its window."""
        module = layer.module
        module.register_buffer("key_blocks", key_blocks, persistent=False)
        module.register_buffer("value_blocks", value_blocks, persistent=False)
        module.attention_handle = self._handle  # type: ignore[assignment]
        module.attention_window = layer.window  # type: ignore[assignment]

    def step(self, batch: PackedBatch) -> AbstractContextManager[None]:
        """While open, the model's layers compute this batch, which the backend has planned."""
        return self.answered_by(self.backend, batch.logit_rows)

    @contextmanager
    def answered_by(self, backend: Answer, logit_rows: torch.Tensor | None = None) -> Iterator[None]:
        """While open, this answers the modules that are bound. `logit_rows`: see `Answering`."""
        self.answering = Answering(backend, logit_rows)
        try:
            yield
        finally:
            self.answering = None


class Answer(Protocol):
    """The part of a `Backend` that layers call."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """See `Backend.attend`."""
        ...


@dataclass(frozen=True, slots=True)
class Answering:
    """Who answers the layers of a pass, and what is wanted of it."""

    backend: Answer
    logit_rows: torch.Tensor | None
    """`[rows]` int64: those whose logits are asked for. None: all."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a module asks of its scores; see `LayerCall`."""

    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """An attention module that called the hook, what it stores a token, and how far back it sees."""

    module: nn.Module
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    """A query at position p sees positions p - window + 1 .. p. None: all before it."""


class Probe(Protocol):
    """What answers in the place of attention while a model is examined."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Query `[1, H, T, D]`, key `[1, N, T, D]`, value `[1, N, T, E]`; returns `[1, T, H, E]`."""
        ...


_probe: Probe | None = None


@contextmanager
def probing(probe: Probe) -> Iterator[None]:
    """While open, `probe` answers every call of the hook. Used at load, before any module is bound."""
    global _probe
    _probe = probe
    try:
        yield
    finally:
        _probe = None


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls: query `[1, H, T, D]`, key and value `[1, N, T, D]`; returns `[1, T,
    H, E]`.

    Once a module is bound its window is the one read from its mask at load, not the argument: some models do not
    pass theirs.
    """
    if _probe is not None:
        return _probe.attend(module, query, key, value, attention_mask, sliding_window), None
    out = torch.ops.millstream.paged_attention(
        query[0],
        key[0],
        value[0],
        module.key_blocks,
        module.value_blocks,
        s_aux,
        module.attention_handle,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        module.attention_window,
        softcap,
    )
    return out[None], None


def attend_rows(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor:
    """The attention of a bound module that has its rows as a backend takes them; no op in between.

    Args:
        query: `[T, H, D]`, contiguous, as are the keys and values `[T, N, D]`.
        attention_mask: as the model gives it; for a probe.

    Returns:
        `[T, H, D]`.
    """
    if _probe is not None:  # the weights are loaded once more
        of_query, of_key, of_value = (rows.transpose(0, 1)[None] for rows in (query, key, value))
        return _probe.attend(module, of_query, of_key, of_value, attention_mask, module.attention_window)[0]
    call = LayerCall(
        query,
        key,
        value,
        module.key_blocks,
        module.value_blocks,
        scores.scaling,
        module.attention_window,
        scores.softcap,
        scores.sinks,
    )
    return _answering(module.attention_handle).backend.attend(call)


def logit_rows(module: Any) -> torch.Tensor | None:
    """See `Answering`: of the pass in which a bound module is called."""
    return None if _probe is not None else _answering(module.attention_handle).logit_rows


def _answering(handle: int) -> Answering:
    """Who answers the modules of a handle.

    Raises:
        RuntimeError: nobody does, most likely because another runner was loaded on these weights.
    """
    attention = _bound.get(handle)
    if attention is None or attention.answering is None:
        raise RuntimeError(
            "a layer was called outside a step of the runner that its weights serve, which is the last one loaded "
            "on them: load this one anew"
        )
    return attention.answering


def _paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    sinks: torch.Tensor | None,
    handle: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    call = LayerCall(
        query.transpose(0, 1).contiguous(),
        key.transpose(0, 1).contiguous(),
        value.transpose(0, 1).contiguous(),
        key_blocks,
        value_blocks,
        scaling,
        sliding_window,
        softcap,
        sinks,
    )
    return _answering(handle).backend.attend(call)


def _paged_attention_shape(
    query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_: Any
) -> torch.Tensor:
    return query.new_empty(query.shape[1], query.shape[0], value.shape[2])


# A Library op costs 12 us a call, custom_op 18. The blocks are marked as written, so no compiler moves a
# call.
_library: Any = torch.library.Library("millstream", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_blocks, Tensor(b!) value_blocks,"
    " Tensor? sinks, int handle, float scaling, int? sliding_window, float? softcap) -> Tensor"
)
_library.impl("paged_attention", _paged_attention, "CompositeExplicitAutograd")
torch.library.register_fake("millstream::paged_attention", _paged_attention_shape, lib=_library)
AttentionInterface.register(NAME, _attend)
