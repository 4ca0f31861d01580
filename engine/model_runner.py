"""One forward pass over the chunks of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from engine.attention import PackedBatch, PagedAttention, pack
from engine.attention.varlen import VarlenBackend
from engine.cuda_graphs import DecodeGraphs, Record
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
        self._graphs: DecodeGraphs | None = None

    @property
    def backend_name(self) -> str:
        """The attention backend in use."""
        return self._attention.backend.name

    @property
    def is_asynchronous(self) -> bool:
        """See `Runner.is_asynchronous`."""
        return bool(self._model.device.type != "cpu")

    @property
    def num_padding_rows(self) -> int:
        """See `Runner.num_padding_rows`."""
        return self._graphs.num_padding_rows if self._graphs else 0

    @property
    def num_replays(self) -> int:
        """See `Runner.num_replays`."""
        return self._graphs.num_replays if self._graphs else 0

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's keys and values, all layers."""
        return self._kv.shape.block_bytes // self.block_size

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], drawn: torch.Tensor | None = None) -> torch.Tensor:
        """See `Runner.forward`. Returns float32 `[sum of num_logits, vocab_size]`."""
        batch = pack(chunks, self.block_size, self._model.device, drawn)
        if self._graphs is not None:
            replayed = self._graphs.replay(batch)
            if replayed is not None:
                return replayed
        self._attention.backend.plan(batch)
        return self._compute(batch).float()

    @torch.inference_mode()
    def record_decodes(
        self, backend: VarlenBackend, max_num_seqs: int, record: Record | None = None
    ) -> DecodeGraphs:
        """From now on steps of at most `max_num_seqs` decodes are replayed; a step of each kind has run before.

        Args:
            backend: the model's attention backend; the KV store has a spare block.
            record: see `DecodeGraphs`.

        Raises:
            RuntimeError: the model cannot be recorded; its steps are computed as before.
        """
        self._graphs = DecodeGraphs(
            self._compute,
            backend,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            scratch_block=self._kv.num_blocks,
            vocab_size=self.vocab_size,
            device=self._model.device,
            record=record,
        )
        return self._graphs

    def _compute(self, batch: PackedBatch) -> torch.Tensor:
        """Logits `[rows, vocab_size]` of a batch that the backend has planned, in the model's dtype."""
        with self._attention.step(batch):
            out = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.logit_rows,
            )
        logits: torch.Tensor = out.logits[0]
        return logits

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Runner.copy_blocks`."""
        self._kv.copy(pairs)
