"""Greedy output is that of transformers' `generate`, token for token, whatever the batch looks like (fp32)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.engine import Engine
from engine.interface import Chunk, Request, Runner
from engine.loading import load_engine, load_runner
from protocol import ErrorCode, Fingerprint, Job, RequestError
from tests.engine.doubles import TokenIds, case, optimistic, request
from tests.models import FIXTURES, save_tiny, tiny_config, tiny_recipe

TINY = tiny_recipe()["requests"]


class EosMasked:
    """The references were made with the end-of-sequence token masked."""

    def __init__(self, runner: Runner, eos: int = 2) -> None:
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.block_size, self.num_kv_blocks = runner.block_size, runner.num_kv_blocks
        self.is_asynchronous = runner.is_asynchronous
        self.num_padding_rows, self.num_replays = runner.num_padding_rows, runner.num_replays
        self._runner, self._eos = runner, eos

    def forward(self, chunks: Sequence[Chunk], drawn: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._runner.forward(chunks, drawn).clone()
        logits[:, self._eos] = -torch.inf
        return logits

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._runner.copy_blocks(pairs)


def engine_for(
    folder: Path,
    *,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    admission: str = "first-fit",
    overlap: bool | None = None,
    **options: Any,
) -> Engine:
    loaded = load_runner(str(folder), dtype="float32", device="cpu", max_num_seqs=max_num_seqs, **options)
    return Engine(
        EosMasked(loaded.runner),
        None,
        TokenIds(),
        Fingerprint(name="tiny"),
        (2,),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        admission=admission,
        overlap=overlap,
    )


def drive(
    engine: Engine, requests: Sequence[Request], arrivals: Sequence[int] | None = None
) -> dict[str, list[int]]:
    """Run requests to their end, each added before step `arrivals[i]` (None: all before the first)."""
    due = sorted(zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0])
    out: dict[str, list[int]] = {request.id: [] for request in requests}
    step = 0
    while due or engine.has_work():
        while due and due[0][0] <= step:
            engine.add(due.pop(0)[1])
        for delta in engine.step():
            assert delta.error is None
            out[delta.request_id] += delta.token_ids
        step += 1
    return out


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The solo run: transformers' own loop, eager attention, its own cache."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
    )
    return list(out[0, len(prompt) :].tolist())


LONG = pytest.mark.long
ARRIVALS = {"together": [0] * 12, "in two halves": [0] * 6 + [9] * 6, "one a step": list(range(12))}


def quick_few(values: Sequence[int], quick: Sequence[int]) -> list[Any]:
    """All of them, and in the quick suite those few."""
    return [value if value in quick else pytest.param(value, marks=LONG) for value in values]


@pytest.mark.parametrize("block_size", quick_few([1, 8, 16, 32], [1, 8]))
def test_the_twelve_prompts_in_one_batch(tiny_model_dir: Path, block_size: int) -> None:
    engine = engine_for(tiny_model_dir, block_size=block_size)
    for name, arrivals in ARRIVALS.items():
        requests = [request(f"{index}", row["prompt_ids"], 40) for index, row in enumerate(TINY)]
        out = drive(engine, requests, arrivals)
        assert [out[f"{index}"] for index in range(12)] == [row["greedy_40"] for row in TINY], name


@pytest.mark.parametrize("budget", quick_few(case("D06")["sweep_max_num_batched_tokens"], [1, 7, 8]))
def test_a_prompt_larger_than_the_budget(tiny_model_dir: Path, budget: int) -> None:
    given = case("D06")
    engine = engine_for(tiny_model_dir, max_num_batched_tokens=budget, block_size=given["block_size"])
    refs = [row["ref"] for row in given["requests"]]
    out = drive(engine, [request(f"{ref}", TINY[ref]["prompt_ids"], 20) for ref in refs])
    assert out == {f"{ref}": TINY[ref]["greedy_40"][:20] for ref in refs}


def test_preempted_sequences_are_computed_again_and_go_on(tiny_model_dir: Path) -> None:
    engine = optimistic(engine_for(tiny_model_dir, block_size=8, num_kv_blocks=20))
    out = drive(engine, [request(f"{index}", row["prompt_ids"], 40) for index, row in enumerate(TINY)])
    assert [out[f"{index}"] for index in range(12)] == [row["greedy_40"] for row in TINY]
    assert engine.stats().preemptions > 0


def test_at_the_context_limit(tiny_model_dir: Path) -> None:
    given = case("C02")
    engine = load_engine(
        str(tiny_model_dir), dtype="float32", device="cpu", max_model_len=given["max_model_len"]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    admitted, lengths, refused = [], {}, []
    for row in reversed(given["rows"]):
        prompt = [3 + (7 * index % 500) for index in range(row["prompt_len"])]
        job = Job.model_validate(
            {"id": str(len(prompt)), "prompt": prompt, "params": {"temperature": 0.0, **given["params"]}}
        )
        if "expect" in row:
            with pytest.raises(RequestError, match=rf"{len(prompt)}.*64") as caught:
                engine.prepare(job)
            assert caught.value.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
            refused.append(len(prompt))
        else:
            admitted.append(engine.prepare(job))
            lengths[job.id] = row["expect_tokens"]
    out = drive(engine, admitted)
    assert {name: len(ids) for name, ids in out.items()} == lengths
    assert refused == [5000, 65, 64]
    for ready in admitted:
        assert out[ready.id] == greedy(model, list(ready.prompts[0]), lengths[ready.id])


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"max_num_batched_tokens": 5}, marks=LONG),
        pytest.param({"num_kv_blocks": 7}, marks=LONG),
        {"num_kv_blocks": 7, "max_num_batched_tokens": 5},
    ],
    ids=str,
)
def test_past_the_sliding_window(tmp_path: Path, options: dict[str, Any]) -> None:
    given = case("D10")
    folder = save_tiny(transformers.MistralForCausalLM, tmp_path, tiny_config(sliding_window=8))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    short = given["prompt_ids"][:6]
    engine = optimistic(engine_for(folder, block_size=8, **options))
    out = drive(engine, [request("long", given["prompt_ids"], 24), request("short", short, 24)], [0, 1])
    assert out["long"] == given["expect_ids"] != given["full_attention_ids_for_contrast"]
    assert out["short"] == greedy(model, short, 24)
    assert (engine.stats().preemptions > 0) == ("num_kv_blocks" in options)


@pytest.mark.model
@pytest.mark.parametrize(("first", "most"), [(3, 4), pytest.param(10, 48, marks=LONG)])
def test_smollm2(smollm2_path: Path, first: int, most: int) -> None:
    rows = json.loads((FIXTURES / "smollm2_greedy_refs.json").read_text())["rows"]
    # Under 0.002 between the best two logits, batch noise may turn the choice.
    fit = {str(index): row for index, row in enumerate(rows) if row["min_margin"] > 0.002}
    assert len(fit) == 10
    fit = dict(islice(fit.items(), first))
    engine = load_engine(str(smollm2_path), dtype="float32", device="cpu", max_model_len=512)
    requests = [
        request(name, row["prompt_ids"], min(most, len(row["greedy_ids"])), ignore_eos=False)
        for name, row in fit.items()
    ]
    out = drive(engine, requests, range(len(fit)))
    assert out == {name: row["greedy_ids"][:most] for name, row in fit.items()}


@LONG
@pytest.mark.model
def test_smollm2_s_text_where_max_tokens_cuts_inside_a_character(smollm2_path: Path) -> None:
    engine = load_engine(str(smollm2_path), dtype="float32", device="cpu", max_model_len=512)
    emoji = case("A03")["real_model"]
    job = Job.model_validate({"id": "A03", "messages": emoji["messages"], "params": emoji["params"]})
    (result,) = engine.generate([job])
    assert result.text == emoji["reference"]["text"]
    assert result.usage is not None
    assert result.usage.prompt_tokens == emoji["reference"]["prompt_tokens"]
