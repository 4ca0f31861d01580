"""One forward pass over the chunks of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from engine.attention import PagedAttention, pack
from engine.interface import Chunk
from engine.kv_store import KVStore


class ModelRunner:
    """The model, its attention and its KV store; implements `engine.interface.Runner`."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: PagedAttention,
        kv: KVStore,
        *,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.block_size = kv.shape.block_size
        self.num_kv_blocks = kv.num_blocks
        self._model = model
        self._kv = kv
        self._attention = attention
        self.num_padding_rows = 0

    @property
    def backend_name(self) -> str:
        """The attention backend in use."""
        return self._attention.backend.name

    @property
    def is_asynchronous(self) -> bool:
        """See `Runner.is_asynchronous`."""
        return self._model.device.type != "cpu"

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], drawn: torch.Tensor | None = None) -> torch.Tensor:
        """See `Runner.forward`. Returns float32 `[sum of num_logits, vocab_size]`."""
        batch = pack(chunks, self.block_size, self._model.device, drawn)
        self._attention.begin(batch)
        out = self._model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
        )
        logits: torch.Tensor = out.logits[0].float()
        return logits

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Runner.copy_blocks`."""
        self._kv.copy(pairs)
