"""The engines that `bench.offline` compares: each loads the model, is warmed, and answers the whole workload once.

All get the same token ids, and time runs from the first request handed over to the last token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import workload
from bench.workload import Row


@dataclass(frozen=True, slots=True)
class Measurement:
    """One engine's run."""

    output_tokens: int
    seconds: float
    load_seconds: float
    settings: str

    def to_dict(self) -> dict[str, Any]:
        """For the pipe to the parent."""
        return asdict(self)


Answer = Callable[[list[Row]], int]
"""Answers the rows and tells how many tokens came out."""


def measure(engine: str, model: Path, rows: int, dtype: str) -> Measurement:
    """Load an engine, run two short requests, then the workload."""
    began = time.monotonic()
    folder = _folder(model)
    tokenizer = _tokenizer(folder)
    requests = workload.load(tokenizer, rows)
    answer, settings = ENGINES[engine].load(model, folder, dtype)
    answer([Row(row.prompt_ids, 4) for row in requests[:2]])
    started = time.monotonic()
    output_tokens = answer(requests)
    ended = time.monotonic()
    wanted = sum(row.max_tokens for row in requests)
    if output_tokens != wanted:
        raise SystemExit(f"{engine} gave {output_tokens} tokens, {wanted} were asked for")
    return Measurement(output_tokens, ended - started, started - began, settings)


def _folder(model: Path) -> Path:
    """Where the plain weights are: a GGUF file is unpacked once."""
    from engine.gguf_cache import converted

    return converted(model)[0] if model.suffix == ".gguf" else model


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _millstream(model: Path, _: Path, dtype: str) -> tuple[Answer, str]:
    from engine import load_engine
    from protocol import Job, SamplingParams

    engine = load_engine(str(model), dtype=dtype)

    def answer(rows: list[Row]) -> int:
        jobs = [
            Job(
                id=f"row-{index}",
                prompt=row.prompt_ids,
                params=SamplingParams(temperature=0, max_tokens=row.max_tokens, ignore_eos=True),
            )
            for index, row in enumerate(rows)
        ]
        results = engine.generate(jobs)
        return sum(len(choice.token_ids) for result in results for choice in result.choices)

    return answer, engine.fingerprint.dtype


def _transformers(folder: Path, dtype: str, attention: str) -> tuple[Any, Any, str]:
    import torch
    from transformers import AutoModelForCausalLM

    from engine.weights import resolve_dtype

    kind = resolve_dtype(dtype, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation=attention).eval()
    return torch, model, str(kind).removeprefix("torch.")


STATIC_BATCH = 32


def _transformers_static(_: Path, folder: Path, dtype: str) -> tuple[Answer, str]:
    torch, model, kind = _transformers(folder, dtype, "sdpa")
    model.generation_config.eos_token_id = None

    def answer(rows: list[Row]) -> int:
        total = 0
        for first in range(0, len(rows), STATIC_BATCH):
            batch = rows[first : first + STATIC_BATCH]
            width = max(len(row.prompt_ids) for row in batch)
            ids = torch.tensor([[0] * (width - len(row.prompt_ids)) + row.prompt_ids for row in batch])
            mask = torch.tensor(
                [[0] * (width - len(row.prompt_ids)) + [1] * len(row.prompt_ids) for row in batch]
            )
            longest = max(row.max_tokens for row in batch)
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)
            # A row's tokens beyond its own length are waste, not output.
            total += sum(min(row.max_tokens, out.shape[1] - width) for row in batch)
        return total

    return answer, f"{kind}, batches of {STATIC_BATCH}, left-padded"


def _transformers_cb(_: Path, folder: Path, dtype: str) -> tuple[Answer, str]:
    from transformers import GenerationConfig

    torch, model, kind = _transformers(folder, dtype, "sdpa")

    def answer(rows: list[Row]) -> int:
        settings = GenerationConfig(
            do_sample=False, eos_token_id=-1, max_new_tokens=max(row.max_tokens for row in rows)
        )
        with torch.inference_mode(), model.continuous_batching_context_manager(settings) as manager:
            for row in rows:
                manager.add_request(row.prompt_ids, max_new_tokens=row.max_tokens, eos_token_id=-1)
            total = 0
            for _ in rows:
                result = manager.get_result(timeout=3600)
                if result is None or result.error:
                    raise SystemExit(f"a request failed: {result and result.error}")
                total += len(result.generated_tokens)
        return total

    return answer, f"{kind}, sdpa"


def _vllm(_: Path, folder: Path, dtype: str) -> tuple[Answer, str]:
    from vllm import LLM, SamplingParams

    engine = LLM(model=str(folder), dtype=dtype, max_model_len=1024, max_num_seqs=128)

    def answer(rows: list[Row]) -> int:
        prompts = [{"prompt_token_ids": row.prompt_ids} for row in rows]
        params = [SamplingParams(temperature=0, max_tokens=row.max_tokens, ignore_eos=True) for row in rows]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return answer, f"dtype {dtype}"


def _openvino(model: Path, _: Path, dtype: str) -> tuple[Answer, str]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = 128
    scheduler.cache_size = 2
    engine = genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU")

    def answer(rows: list[Row]) -> int:
        ids = [ov.Tensor(np.array([row.prompt_ids], np.int64)) for row in rows]
        settings = []
        for row in rows:
            config = genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = row.max_tokens
            config.ignore_eos = True
            config.do_sample = False
            settings.append(config)
        results = engine.generate(ids, settings)
        return sum(len(result.m_generation_ids[0]) for result in results)

    return answer, f"weights as in {model.name}" if model.suffix == ".gguf" else f"dtype {dtype}"


@dataclass(frozen=True, slots=True)
class Engine:
    """How an engine is found and loaded."""

    module: str
    load: Callable[[Path, Path, str], tuple[Answer, str]]


ENGINES = {
    "millstream": Engine("engine", _millstream),
    "transformers-static": Engine("transformers", _transformers_static),
    "transformers-cb": Engine("transformers", _transformers_cb),
    "vllm": Engine("vllm", _vllm),
    "openvino": Engine("openvino_genai", _openvino),
}
