"""The parts of `bench.gpu`. Models have random weights: nothing is downloaded, and nobody's tokens are asked for.

Each part gets a `Scale` and gives rows of a table; what is wrong with the tokens is an `AssertionError`.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from bench.gpu_models import Scale, tiny_models
from bench.workload import Row
from engine.attention import NAME
from engine.engine import Engine
from engine.loading import Loaded, load_runner
from engine.weights import Weights
from protocol import Fingerprint, Job, SamplingParams

Cells = dict[str, str]
NEARLY = 0.1
"""A token may lie this many standard deviations of its logits below the best one, in 16 bits."""


def tokens(scale: Scale) -> Iterable[Cells]:
    """Whether the tokens are those of transformers: all in float32, all but near-ties in 16 bits.

    Prompts cross blocks, steps mix chunks with decodes, and the decodes fill graphs of several sizes.
    """
    names = ["llama"] if scale.device == "cpu" else list(tiny_models())
    dtypes = [torch.float32] if scale.device == "cpu" else [torch.float32, torch.bfloat16]
    source = random.Random(0)
    longest = 20 if scale.device == "cpu" else 700
    prompts = [[source.randrange(3, 512) for _ in range(source.randint(2, longest))] for _ in range(7)]
    for name in names:
        for dtype in dtypes:
            torch.manual_seed(0)
            theirs = made(tiny_models()[name], scale.device, dtype, "sdpa" if name != "gpt-oss" else "eager")
            loaded = loaded_as(tiny_models()[name], scale.device, dtype, seqs=7, like=theirs)
            rows = [Row(prompt, 24 + 3 * index) for index, prompt in enumerate(prompts)]
            run = answer(loaded, engine_of(loaded, seqs=7, batched=64), rows, temperature=0)
            same, worst = _compared(theirs, rows, run.outputs)
            if same < 1 and dtype == torch.float32:
                raise AssertionError(f"{name}, float32: {same:.1%} of tokens are generate's")
            if not worst < NEARLY:
                raise AssertionError(f"{name}, {dtype}: a token is {worst:.2f} deviations below the best")
            yield {
                "what": f"{name}, {str(dtype).removeprefix('torch.')}",
                "attention": loaded.runner.backend_name,
                "tokens equal to generate": f"{same:.1%}",
                "furthest below the best logit": f"{worst:.3f} of its deviation",
                **graph_cells(run),
            }


def _compared(theirs: Any, rows: Sequence[Row], outputs: Sequence[list[int]]) -> tuple[float, float]:
    """Share of tokens that `generate` gives too, and how far below the best logit any of ours lies."""
    theirs.generation_config.eos_token_id = None
    equal = total = 0
    worst = 0.0
    for row, output in zip(rows, outputs, strict=True):
        ids = torch.tensor([row.prompt_ids], device=theirs.device)
        length, count = len(row.prompt_ids), row.max_tokens
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )[0, length:].tolist()
        equal += sum(map(int.__eq__, expected, output))
        total += count
        told = torch.tensor([row.prompt_ids + output], device=theirs.device)
        with torch.inference_mode():
            logits = theirs(told).logits[0, length - 1 : -1].float()
        ours = logits.gather(1, told[0, length:, None])[:, 0]
        worst = max(worst, float(((logits.amax(1) - ours) / logits.std(1)).max()))
    return equal / total, worst


def nano_vllm(scale: Scale) -> Iterable[Cells]:
    """The published workload of nano-vllm's bench.py: sampled at 0.6, ends ignored, on the shape of Qwen3-0.6B."""
    rows = nano_vllm_rows(scale.sequences, scale.longest, scale.small.vocab_size)
    yield from ours(scale, scale.small, rows, temperature=0.6)


def nano_vllm_rows(sequences: int, longest: int, vocab_size: int) -> list[Row]:
    """Prompts of 100 to 1,024 random ids, then as many outputs, all from one generator with seed 0.

    At full size 133,966 tokens come out, as its authors tell.
    """
    source = random.Random(0)
    least, highest = min(100, longest // 2), min(10_000, vocab_size - 1)
    prompts = [
        [source.randint(0, highest) for _ in range(source.randint(least, longest))] for _ in range(sequences)
    ]
    return [Row(prompt, source.randint(least, longest)) for prompt in prompts]


def llama_8b(scale: Scale) -> Iterable[Cells]:
    """A batch that starts and ends together, on the shape of Llama 3.1 8B."""
    yield from ours(scale, scale.large, _even_rows(scale), temperature=0)


def llama_8b_transformers(scale: Scale) -> Iterable[Cells]:
    """The same by transformers' continuous batching, with what it chooses itself."""
    rows = _even_rows(scale)
    model = made(scale.large, scale.device, scale.dtype, "sdpa")
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=rows[0].max_tokens)
    with torch.inference_mode(), model.continuous_batching_context_manager(settings) as manager:
        _by_manager(manager, rows[:2])
        began = time.perf_counter()
        count = _by_manager(manager, rows)
        seconds = time.perf_counter() - began
    yield {"what": "transformers continuous batching", "output tok/s": f"{count / seconds:,.0f}"}


def _by_manager(manager: Any, rows: Sequence[Row]) -> int:
    for row in rows:
        manager.add_request(row.prompt_ids, max_new_tokens=row.max_tokens, eos_token_id=-1)
    count = 0
    for _ in rows:
        result = manager.get_result(timeout=600)
        if result is None or result.error:
            raise RuntimeError(f"a request failed: {result and result.error}")
        count += len(result.generated_tokens)
    return count


def _even_rows(scale: Scale) -> list[Row]:
    source = random.Random(1)
    length, highest = scale.longest // 4, scale.large.vocab_size - 1
    return [Row([source.randint(3, highest) for _ in range(length)], length) for _ in range(scale.sequences)]


def ours(scale: Scale, config: PreTrainedConfig, rows: list[Row], temperature: float) -> Iterable[Cells]:
    """One workload through the engine, and what the memory's speed would have allowed."""
    speed = copy_speed(scale.device)
    loaded = loaded_as(config, scale.device, scale.dtype, seqs=scale.sequences)
    engine = engine_of(loaded, seqs=scale.sequences, batched=scale.batched_tokens)
    answer(loaded, engine, [Row(row.prompt_ids[:8], 4) for row in rows[:2]], temperature)
    run = answer(loaded, engine, rows, temperature)
    wanted = sum(row.max_tokens for row in rows)
    made_tokens = sum(map(len, run.outputs))
    if made_tokens != wanted:
        raise AssertionError(f"{made_tokens} tokens came out, {wanted} were asked for")
    weights, a_token = weight_bytes(loaded.weights.model), loaded.runner.kv_token_bytes
    floor = floor_seconds(weights, a_token, rows, run.steps, speed)
    yield {
        "what": "millstream",
        "attention": loaded.runner.backend_name,
        "output tok/s": f"{wanted / run.seconds:,.0f}",
        "tokens": f"{wanted:,} in {run.seconds:.1f} s, {run.steps} steps",
        "share of the bandwidth floor": f"{floor / run.seconds:.0%} of {speed / 1e9:,.0f} GB/s",
        "KV allocated and unused": f"{run.unused:.1%}",
        "preemptions": f"{run.preemptions}",
        **graph_cells(run),
    }


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a step reads: all but a table of embeddings, of which it looks up a few rows."""
    embedded = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.nbytes
    return sum(int(weight.nbytes) for weight in model.parameters()) - int(embedded)


def floor_seconds(weights: int, a_token: int, rows: Sequence[Row], steps: int, speed: float) -> float:
    """Time of reading the weights once a step, and each sequence's keys and values once a token of its output.

    Args:
        weights: bytes of them.
        a_token: bytes of a token's keys and values.
        speed: bytes a second.
    """
    contexts = sum(
        row.max_tokens * len(row.prompt_ids) + row.max_tokens * (row.max_tokens + 1) // 2 for row in rows
    )
    return (steps * weights + contexts * a_token) / speed


def copy_speed(device: str) -> float:
    """Bytes read and written a second by the fastest of some copies within the device's memory."""
    size = 1 << (30 if device == "cuda" else 25)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        _finish(device)
        began = time.perf_counter()
        target.copy_(source)
        _finish(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def graph_cells(run: Run) -> Cells:
    """How many steps were replayed, and the rows computed for nobody."""
    return {
        "graph hits": f"{run.replays} of {run.steps} steps",
        "padding rows": f"{run.padding_rows}",
    }


class _Ids:
    """Prompts that are token ids already; implements `engine.interface.PromptEncoder`."""

    def encode(self, job: Job) -> list[list[int]]:
        """The one prompt."""
        (prompt,) = job.prompts
        assert not isinstance(prompt, str)
        return [list(prompt)]

    def words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """There is no tokenizer to ask."""
        raise NotImplementedError(words)


def made(config: PreTrainedConfig, device: str, dtype: torch.dtype, attention: str) -> Any:
    """A model of random weights, made where it runs."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval()


def loaded_as(
    config: PreTrainedConfig, device: str, dtype: torch.dtype, *, seqs: int, like: Any = None
) -> Loaded:
    """A model of random weights, or of another's, with its attention, KV store and graphs."""
    model = made(config, device, dtype, NAME)
    if like is not None:
        model.load_state_dict(like.state_dict())
    kind = str(dtype).removeprefix("torch.")
    weights = Weights(model, None, Fingerprint(name=config.model_type, dtype=kind), frozenset())
    gc.collect()
    return load_runner(weights, max_num_seqs=seqs)


def engine_of(loaded: Loaded, *, seqs: int, batched: int) -> Engine:
    """An engine without text around a model."""
    return Engine(
        loaded.runner,
        None,
        _Ids(),
        loaded.weights.fingerprint,
        (),
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
    )


@dataclass(frozen=True, slots=True)
class Run:
    """What came of some rows."""

    outputs: list[list[int]]
    seconds: float
    steps: int
    replays: int
    padding_rows: int
    unused: float
    """Part of the KV that was allocated and held no token, over all steps."""
    preemptions: int


def answer(loaded: Loaded, engine: Engine, rows: Sequence[Row], temperature: float) -> Run:
    """Hand all rows over at once. No token ends a sequence."""
    jobs = [
        Job(
            id=f"row-{index}",
            prompt=row.prompt_ids,
            params=SamplingParams(temperature=temperature, max_tokens=row.max_tokens, ignore_eos=True),
        )
        for index, row in enumerate(rows)
    ]
    before, replays = engine.stats(), loaded.runner.num_replays
    began = time.perf_counter()
    results = engine.generate(jobs)
    seconds = time.perf_counter() - began
    after = engine.stats()
    allocated = after.kv_tokens_allocated - before.kv_tokens_allocated
    return Run(
        [list(result.choices[0].token_ids) for result in results],
        seconds,
        after.steps - before.steps,
        loaded.runner.num_replays - replays,
        after.padding_rows - before.padding_rows,
        (after.kv_tokens_unused - before.kv_tokens_unused) / allocated if allocated else 0.0,
        after.preemptions - before.preemptions,
    )


PARTS = {
    "tokens": tokens,
    "nano-vllm": nano_vllm,
    "llama-8b": llama_8b,
    "llama-8b-transformers": llama_8b_transformers,
}
