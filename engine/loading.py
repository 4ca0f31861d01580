"""From a model's name to a running engine: find it, check it, size its KV, warm it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import torch
from transformers import PreTrainedModel

from engine.attention import PagedAttention, ProbedLayer, choose_backend
from engine.attention.kv_dtype import KV_DTYPES, choose_kv_dtype
from engine.attention.kv_layout import KVLayout
from engine.attention.varlen import VarlenBackend
from engine.breaker import fault_of
from engine.compilation import CompileClock, compile_clock, compile_layers
from engine.engine import Engine
from engine.fusion import fuse_layers, settle_layers
from engine.grammar import Grammars
from engine.int8_linear import with_int8_linears
from engine.interface import Chunk
from engine.kv_store import KVShape, KVStore, free_memory, share_and_cap
from engine.limits import Given, Ground, Limits, check, readable, resolve, smaller_pool
from engine.model_runner import ModelRunner
from engine.options import check_words
from engine.packed_linear import pack_linears
from engine.panel_linear import linear_kind
from engine.probe import context_length, probe
from engine.prompts import Prompts
from engine.weights import Weights, load_weights
from protocol import OptionRefused

log = logging.getLogger(__name__)

COMPILE_BY_DEFAULT = False
"""Measured in bench/NOTES.md: on two cores compiling costs more at start-up than it gives back in a short run."""


_SIZES = {"max_model_len", "block_size", "num_kv_blocks", "kv_memory"}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to compute."""

    weights: Weights
    runner: ModelRunner
    limits: Limits


class RunnerOptions(TypedDict, total=False):
    """The keywords of `load_runner` that `load_engine` hands on."""

    dtype: str
    device: str
    max_model_len: int | None
    block_size: int | None
    num_kv_blocks: int | None
    kv_memory: int | None
    kv_dtype: str | None
    quantization: str | None
    compile: bool | None
    revision: str | None
    trust_remote_code: bool
    served_model_name: str | None


def load_runner(
    model: str | Weights,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_model_len: int | None = None,
    block_size: int | None = None,
    num_kv_blocks: int | None = None,
    kv_memory: int | None = None,
    kv_dtype: str | None = None,
    quantization: str | None = None,
    compile: bool | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    served_model_name: str | None = None,
) -> Loaded:
    """Load a model, its attention and its KV store.

    Args:
        model: a hub id, a local folder, or a `.gguf` file; or what has been loaded of one. Then layers stay as they
            were packed, fused or quantized, and the runner that had the weights raises from its next step on.
        dtype: `auto`, `float32`, `bfloat16` or `float16`; auto is what the device computes fast.
        device: `auto`, `cpu`, `cuda` or `cuda:<n>`.
        max_num_seqs: sequences that run at once; no more KV is taken than they can fill. Of this and what follows,
            what is None is fitted to what is given, see `engine.limits`.
        max_num_batched_tokens: tokens a step computes at most.
        max_model_len: most tokens of a sequence; None: what the model was made for and the KV store holds.
        block_size: tokens of a KV block; None: 8 on a CPU, 16 on a GPU, or the fewest that its attention reads; fewer
            where no sequence may be so long.
        num_kv_blocks: blocks of the KV store; None: sized by memory.
        kv_memory: bytes of the KV store; None: a share of what is free.
        kv_dtype: `float32`, `bfloat16`, `float16`, `int8` or `fp8`; None or `auto`: the model's.
        quantization: `int8`: linear layers in int8, on a CPU and not compiled; None or `none`: as the checkpoint has
            them.
        compile: whether decoder layers are compiled; None: `COMPILE_BY_DEFAULT`. False also leaves a GPU's decode
            steps unrecorded: it starts at once.
        revision: branch, tag or commit of a hub id; None: its main branch.
        trust_remote_code: run modeling code that comes with the model.
        served_model_name: name in the fingerprint; None: the hub id, or the folder's or file's stem.

    Raises:
        ModelUnavailable: no such model, one that bypasses our attention, or no memory for KV.
        OptionRefused: there is no such choice, or a limit contradicts the model or the memory.
    """
    began = time.monotonic()
    switches = {"compile": compile, "trust_remote_code": trust_remote_code}
    check_words({"dtype": dtype, "kv_dtype": kv_dtype, "quantization": quantization, **switches})
    weights = (
        model
        if isinstance(model, Weights)
        else load_weights(
            model,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            served_model_name=served_model_name,
        )
    )
    parts = {"weights": time.monotonic() - began}
    given = Given(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        kv_memory=kv_memory,
    )
    int8 = quantization == "int8"
    sized = _size(weights.model, given, kv_dtype, recordable=compile is not False)
    with _beside_the_pool(given, sized.ground, sized.limits):
        compiled = COMPILE_BY_DEFAULT and not int8 if compile is None else compile
        weights, made = _make_ready(weights, sized, parts, compiled=compiled, int8=int8)
    made += f", {record_decodes(sized.runner, sized.recordable, sized.limits.max_num_seqs)}"
    if sized.kv_dtype != weights.model.dtype:
        weights = replace(weights, fingerprint=weights.fingerprint.model_copy(update={"kv_dtype": kv_dtype}))
    log.info(
        "loaded %s in %.1f s (%s): %s, %s",
        weights.fingerprint,
        time.monotonic() - began,
        ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items()),
        sized,
        made,
    )
    return Loaded(weights, sized.runner, sized.limits)


@dataclass(frozen=True, slots=True)
class _Sized:
    """A model that is bound to its attention and to a KV store of settled size."""

    runner: ModelRunner
    layers: list[ProbedLayer]
    attention: PagedAttention
    kv_dtype: torch.dtype
    ground: Ground
    limits: Limits
    recordable: VarlenBackend | None
    """The backend whose decode steps can be recorded as CUDA graphs, if they are to be."""

    @property
    def pool_bytes(self) -> int:
        """Of the KV store's blocks."""
        return self.limits.num_kv_blocks * self.limits.block_size * self.ground.token_bytes

    def __str__(self) -> str:
        limits = self.limits
        return (
            f"context {limits.max_model_len}, {limits.max_num_seqs} slots, {limits.num_kv_blocks} KV blocks of "
            f"{limits.block_size} tokens ({self.pool_bytes / 2**30:.2f} GiB), attention {self.runner.backend_name}"
        )


def _size(net: PreTrainedModel, given: Given, kv_dtype: str | None, *, recordable: bool) -> _Sized:
    """Settle every limit of a loaded model, take its KV store and bind its attention modules to it."""
    layers, vocab_size = probe(net, given.max_model_len or context_length(net) or 1)
    backend = choose_backend(net.device, net.dtype)
    kv_kept = choose_kv_dtype(KV_DTYPES.get(kv_dtype or "auto"), net.dtype, backend)
    layout = backend.kv_layout
    a_token = KVShape.of(layers, kv_kept, 1, layout.token_major)
    ground = _ground(net, a_token.block_bytes, layout)
    limits = _settle(given, ground)
    shape = replace(a_token, block_size=limits.block_size)
    recorded = backend if isinstance(backend, VarlenBackend) and recordable else None
    kv = KVStore(shape, limits.num_kv_blocks, net.device, spare=0 if recorded is None else 1)
    attention = PagedAttention(backend)
    for layer, (key_blocks, value_blocks) in zip(layers, kv.layers, strict=True):
        attention.bind(layer, key_blocks, value_blocks)
    runner = ModelRunner(net, attention, kv, max_model_len=limits.max_model_len, vocab_size=vocab_size)
    return _Sized(runner, layers, attention, kv_kept, ground, limits, recorded)


def _make_ready(
    weights: Weights, sized: _Sized, parts: dict[str, float], *, compiled: bool, int8: bool
) -> tuple[Weights, str]:
    """Fuse, pack, quantize or compile the model's layers and run each kind of step once.

    Args:
        parts: seconds by part of the start; those of this one are added.

    Returns:
        The weights as they are now called, and what was made of the layers, for the log.
    """
    net, layers, run = weights.model, sized.layers, one_pass(sized.runner)
    with compile_clock() as packing, _part(parts, "packing", packing):
        if not compiled:
            fuse_layers(net, layers, sized.attention, sized.limits.max_model_len)
        if int8:
            weights = with_int8_linears(weights, run)
        pack_linears(net, run, linear_kind(net, free_memory(net.device) - sized.pool_bytes))
        fused = settle_layers(net)
    made = f"{fused} of {len(layers)} layers fused"
    if compiled and compile_layers(net, layers):
        made = "compiled"
    with compile_clock() as warming, _part(parts, "warm-up", warming):
        warm_up(sized.runner)
    parts["compiling"] = packing.seconds + warming.seconds
    return weights, made


def _ground(net: PreTrainedModel, token_bytes: int, layout: KVLayout) -> Ground:
    """What limits are settled on."""
    share, cap = share_and_cap(net.device)
    return Ground(
        context=context_length(net),
        token_bytes=token_bytes,
        free=free_memory(net.device),
        share=share,
        cap=cap,
        usual_block_size=layout.usual_block_size,
        block_multiple=layout.block_multiple,
    )


def _settle(given: Given, ground: Ground) -> Limits:
    """Every limit, with a line of warning where the pool shortens the model's context."""
    limits = resolve(given, ground)
    if ground.context is not None and given.max_model_len is None and limits.max_model_len < ground.context:
        log.warning(
            "the KV pool holds %d tokens: max_model_len is that, and the model could take %d",
            limits.max_model_len,
            ground.context,
        )
    return limits


@contextmanager
def _beside_the_pool(given: Given, ground: Ground, limits: Limits) -> Iterator[None]:
    """While open, a model is made ready in what the KV pool has left.

    Raises:
        OptionRefused: that does not suffice; it proposes a smaller pool.
    """
    try:
        yield
    except Exception as error:
        fault = fault_of(error)
        if fault is None or fault.kind != "memory":
            raise
        pool = limits.num_kv_blocks * limits.block_size * ground.token_bytes
        raise OptionRefused(
            f"a KV pool of {limits.num_kv_blocks} blocks takes {readable(pool)} of the {readable(ground.free)} that "
            f"were free, and the model ran out of memory beside it ({fault.message})",
            smaller_pool(given, ground, limits.num_kv_blocks),
        ) from error


@contextmanager
def _part(parts: dict[str, float], name: str, clock: CompileClock) -> Iterator[None]:
    """Note the seconds of a part of the start, without what compilers take of them."""
    began, compiled = time.monotonic(), clock.seconds
    yield
    parts[name] = time.monotonic() - began - (clock.seconds - compiled)


MOST_RECORDED = 512
"""Sequences of the largest recorded step: its logits are kept, 4 bytes a token of the vocabulary and sequence."""


def record_decodes(runner: ModelRunner, backend: VarlenBackend | None, max_num_seqs: int) -> str:
    """Record the decode steps of a warm runner as CUDA graphs, if they can be; what the log is to say of it."""
    if backend is None:
        return "no CUDA graphs"
    try:
        graphs = runner.record_decodes(backend, min(max_num_seqs, MOST_RECORDED))
    except RuntimeError as error:
        log.warning("decodes are launched kernel by kernel: %s", str(error).strip().splitlines()[0])
        return "no CUDA graphs"
    return f"{graphs.num_graphs} CUDA graphs in {graphs.seconds:.1f} s"


def load_engine(
    model: str,
    *,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_step_ms: float | None = None,
    admission: str = "first-fit",
    overlap: bool | None = None,
    **options: Unpack[RunnerOptions],
) -> Engine:
    """Load a model and the engine around it.

    Args:
        model: a hub id, a local folder, or a `.gguf` file.
        max_num_seqs: sequences that run at once; None: 128, or as many as the pool has blocks.
        max_num_batched_tokens: tokens a step computes at most; None: 512, or as many as there are slots.
        max_step_ms: milliseconds a step should take at most; None: no bound.
        admission: `first-fit`, `best-fit` or `priority`.
        overlap: launch each step before the last one's tokens are read; None: where the device is a GPU.
        options: see `load_runner`.

    Raises:
        ModelUnavailable: no such model, or one that bypasses our attention.
        OptionRefused: options contradict each other, the model or the memory; it names the nearest that work.
        TypeError: there is no such option.
    """
    for name in options.keys() - RunnerOptions.__annotations__.keys():
        raise TypeError(f"load_engine() got an unexpected keyword argument {name!r}")
    check_words({"admission": admission, "overlap": overlap, **options})
    sizes: dict[str, Any] = {name: value for name, value in options.items() if name in _SIZES}
    check(Given(max_num_seqs, max_num_batched_tokens, max_step_ms, **sizes))
    loaded = load_runner(
        model, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **options
    )
    weights, limits = loaded.weights, loaded.limits
    return Engine(
        loaded.runner,
        weights.tokenizer,
        Prompts(weights.tokenizer),
        weights.fingerprint,
        weights.eos_token_ids,
        grammars=Grammars(weights.tokenizer, loaded.runner.vocab_size, weights.eos_token_ids),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_step_ms=max_step_ms,
        admission=admission,
        overlap=overlap,
    )


def one_pass(runner: ModelRunner) -> Callable[[], object]:
    """Calls the model once: a token into block 0, which nobody owns yet."""
    return lambda: runner.forward([Chunk([0], 0, [0], num_logits=1)])


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
