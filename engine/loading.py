"""From a model's name to a running engine: find it, check it, size its KV, warm it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from engine.attention import PagedAttention, choose_backend
from engine.attention.kv_dtype import choose_kv_dtype, parse_kv_dtype
from engine.compilation import compile_layers
from engine.engine import Engine
from engine.grammar import Grammars
from engine.interface import Chunk
from engine.kv_store import KVShape, KVStore, free_memory, plan_num_blocks, share_and_cap
from engine.model_runner import ModelRunner
from engine.packed_linear import pack_linears
from engine.probe import context_length, probe
from engine.prompts import Prompts
from engine.weights import Weights, load_weights

log = logging.getLogger(__name__)

COMPILE_BY_DEFAULT = False
"""Measured in bench/NOTES.md: on two cores compiling costs more at start-up than it gives back in a short run."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to compute."""

    weights: Weights
    runner: ModelRunner


class RunnerOptions(TypedDict, total=False):
    """The keywords of `load_runner` that `load_engine` hands on."""

    dtype: str
    device: str
    max_model_len: int | None
    block_size: int
    num_kv_blocks: int | None
    kv_memory: int | None
    kv_dtype: str
    compile: bool | None
    revision: str | None
    trust_remote_code: bool
    served_model_name: str | None


def load_runner(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_num_seqs: int = 128,
    max_model_len: int | None = None,
    block_size: int = 32,
    num_kv_blocks: int | None = None,
    kv_memory: int | None = None,
    kv_dtype: str = "auto",
    compile: bool | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    served_model_name: str | None = None,
) -> Loaded:
    """Load a model, its attention and its KV store.

    Args:
        model: a hub id, a local folder, or a `.gguf` file.
        dtype: `auto`, `float32`, `bfloat16` or `float16`; auto is what the device computes fast.
        device: `auto`, `cpu`, `cuda` or `cuda:<n>`.
        max_num_seqs: sequences that run at once; no more KV is taken than they can fill.
        max_model_len: most tokens of a sequence; None: what the model was made for.
        num_kv_blocks: blocks of the KV store; None: sized by memory.
        kv_memory: bytes of the KV store; None: a share of what is free.
        kv_dtype: `auto` (the model's), `float32`, `bfloat16`, `float16`, `int8` or `fp8`.
        compile: whether decoder layers are compiled; None: `COMPILE_BY_DEFAULT`.
        revision: branch, tag or commit of a hub id; None: its main branch.
        trust_remote_code: run modeling code that comes with the model.
        served_model_name: name in the fingerprint; None: the hub id, or the folder's or file's stem.

    Raises:
        ModelUnavailable: no such model, one that bypasses our attention, or too little memory for one
        sequence.
    """
    began = time.monotonic()
    kv_asked = parse_kv_dtype(kv_dtype)
    weights = load_weights(
        model,
        dtype=dtype,
        device=device,
        revision=revision,
        trust_remote_code=trust_remote_code,
        served_model_name=served_model_name,
    )
    net = weights.model
    length = context_length(net, max_model_len)
    layers, vocab_size = probe(net, length)

    backend = choose_backend(net.device, net.dtype)
    kv_kept = choose_kv_dtype(kv_asked, net.dtype, backend)
    shape = KVShape.of(layers, kv_kept, block_size)
    share, cap = share_and_cap(net.device)
    num_blocks = plan_num_blocks(
        shape,
        max_model_len=length,
        max_num_seqs=max_num_seqs,
        free=free_memory(net.device),
        share=share,
        cap=cap,
        kv_memory=kv_memory,
        num_kv_blocks=num_kv_blocks,
    )
    kv = KVStore(shape, num_blocks, net.device)
    attention = PagedAttention(backend)
    for layer, (key_blocks, value_blocks) in zip(layers, kv.layers, strict=True):
        attention.bind(layer, key_blocks, value_blocks)

    compiled = compile_layers(net, layers) if (COMPILE_BY_DEFAULT if compile is None else compile) else False
    runner = ModelRunner(net, attention, kv, max_model_len=length, vocab_size=vocab_size)
    if not compiled:  # a compiled graph takes no packed weights
        pack_linears(net, lambda: runner.forward([Chunk([0], 0, [0], num_logits=1)]))
    warm_up(runner)
    if kv_kept != net.dtype:
        weights = replace(weights, fingerprint=weights.fingerprint.model_copy(update={"kv_dtype": kv_dtype}))
    log.info(
        "loaded %s in %.1f s: context %d, %d KV blocks of %d tokens (%.2f GiB), attention %s, %s",
        weights.fingerprint,
        time.monotonic() - began,
        length,
        num_blocks,
        block_size,
        num_blocks * shape.block_bytes / 2**30,
        attention.backend.name,
        "compiled" if compiled else "not compiled",
    )
    return Loaded(weights, runner)


def load_engine(
    model: str,
    *,
    max_num_seqs: int = 128,
    max_num_batched_tokens: int = 512,
    max_step_ms: float | None = None,
    admission: str = "first-fit",
    overlap: bool | None = None,
    **options: Unpack[RunnerOptions],
) -> Engine:
    """Load a model and the engine around it.

    Args:
        model: a hub id, a local folder, or a `.gguf` file.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens a step computes at most.
        max_step_ms: milliseconds a step should take at most; None: no bound.
        admission: `first-fit`, `best-fit` or `priority`.
        overlap: launch each step before the last one's tokens are read; None: where the device is a GPU.
        options: see `load_runner`.

    Raises:
        ModelUnavailable: no such model, one that bypasses our attention, or too little memory for one sequence.
        ValueError: no such admission policy, or a limit below 1.
    """
    loaded = load_runner(model, max_num_seqs=max_num_seqs, **options)
    weights = loaded.weights
    return Engine(
        loaded.runner,
        weights.tokenizer,
        Prompts(weights.tokenizer),
        weights.fingerprint,
        weights.eos_token_ids,
        grammars=Grammars(weights.tokenizer, loaded.runner.vocab_size, weights.eos_token_ids),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_step_ms=max_step_ms,
        admission=admission,
        overlap=overlap,
    )


def warm_up(runner: ModelRunner) -> None:
    """Run each kind of step once, so that what is compiled on first use is compiled before the first request.

    A row alone is a kind of its own: torch.compile makes separate code for a length of one. Blocks are not
    owned by anyone yet, so block 0 may be written.
    """

    def chunk(tokens: int, start: int = 0) -> Chunk:
        return Chunk([0] * tokens, start, [0] * (start + tokens), num_logits=1)

    decode = chunk(1)
    runner.forward([decode])
    runner.forward([decode, decode])
    if runner.max_model_len > 1:
        runner.forward([chunk(2)])
        runner.forward([decode, chunk(2), decode])
    if runner.max_model_len > 2:
        runner.forward([chunk(2, start=1)])
