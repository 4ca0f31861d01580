"""The cases of scheduling and KV on the tiny model: cached, aborted, penalised, too large."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.interface import Delta, Request
from protocol import ErrorCode, Job, RequestError, SamplingParams
from tests.engine.doubles import assert_empty, case, choices, request, run, token_ids
from tests.engine.test_equal_generate import engine_for
from tests.models import tiny_recipe

REFS = tiny_recipe()["requests"]
VARIANTS: dict[str, dict[str, float]] = {
    "greedy_40": {},
    # Beyond the range that a job may ask for; it makes a fault plain.
    "presence8_frequency8_40": {"presence_penalty": 8.0, "frequency_penalty": 8.0},
    "repetition1_8_40": {"repetition_penalty": 1.8},
}


def penalised(name: str, prompt: list[int], max_tokens: int, penalties: dict[str, float]) -> Request:
    params = SamplingParams(temperature=0, ignore_eos=True).model_copy(update=penalties)
    return Request(name, (tuple(prompt),), params, 0, (max_tokens,))


@pytest.mark.parametrize("block_size", case("D09")["block_sizes"])
def test_penalties_and_mixed_lengths_in_one_batch(tiny_model_dir: Path, block_size: int) -> None:
    engine = engine_for(tiny_model_dir, block_size=block_size)
    requests = [
        penalised(f"{index} {variant}", row["prompt_ids"], 40, penalties)
        for index, row in enumerate(REFS)
        for variant, penalties in VARIANTS.items()
    ]
    out = run(engine, requests)
    for index, row in enumerate(REFS):
        for variant in VARIANTS:
            assert token_ids(out[f"{index} {variant}"]) == row[variant], (index, variant)


def test_a_prompt_that_is_in_the_cache_whole(tiny_model_dir: Path) -> None:
    given = case("D04")
    engine = engine_for(tiny_model_dir, block_size=given["block_size"])
    roomy: dict[tuple[int, ...], list[int]] = {}
    for index in (3, 6, 9):
        roomy[tuple(REFS[index]["prompt_ids"])] = REFS[index]["greedy_40"]
    first = REFS[3]["prompt_ids"]
    alone = token_ids(run(engine_for(tiny_model_dir), [request("alone", first[:8], 10)])["alone"])
    roomy[tuple(first[:8])] = alone
    roomy[tuple(first + REFS[3]["greedy_40"][:8])] = REFS[3]["greedy_40"][8:18]
    sequence = [
        {**row, "prompt": REFS[row["ref"]]["prompt_ids"] if "ref" in row else None}
        for row in given["sequence"]
    ]
    sequence[-2]["prompt"] = first[:8]
    sequence[-1]["prompt"] = first + REFS[3]["greedy_40"][:8]
    for number, row in enumerate(sequence):
        cached = engine.stats().cached_tokens
        new = request(f"r{number}", row["prompt"], row["max_tokens"], n=row.get("n", 1))
        for ids in choices(run(engine, [new])[new.id]).values():
            assert ids == roomy[tuple(row["prompt"])][: row["max_tokens"]], number
        cached = engine.stats().cached_tokens - cached
        seen_before = any(row["prompt"][:8] == earlier["prompt"][:8] for earlier in sequence[:number])
        assert (cached > 0) == ((seen_before and len(row["prompt"]) > 8) or row.get("n", 1) > 1), number
        assert cached < len(row["prompt"]) * row.get("n", 1)
    twins = run(engine_for(tiny_model_dir, block_size=8), [request(name, first, 10) for name in "ab"])
    assert token_ids(twins["a"]) == token_ids(twins["b"]) == REFS[3]["greedy_40"][:10]


class Pool:
    """D08's engine, with others at work beside the request that is aborted."""

    def __init__(self, folder: Path) -> None:
        given = case("D08")
        self.engine = engine_for(
            folder,
            block_size=given["block_size"],
            num_kv_blocks=given["num_kv_blocks"],
            max_num_batched_tokens=given["max_num_batched_tokens"],
        )
        self.deltas: dict[str, list[Delta]] = defaultdict(list)

    def start(self, number: int, **params: Any) -> None:
        """Prompts of different rounds differ, so that no round is served from the cache alone."""
        self.deltas.clear()
        prompt = [3 + (number * 7 + token) % 500 for token in range(40)]
        self.engine.add(request("gone", prompt, 12, **params))
        self.engine.add(request("stays", REFS[5]["prompt_ids"], 12))

    def until(self, happened: Callable[[], bool]) -> None:
        for _ in range(60):
            if happened():
                return
            for delta in self.engine.step():
                self.deltas[delta.request_id].append(delta)
        raise AssertionError("it never happened")

    def outputs(self) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas["gone"])


ABORTS: dict[str, Callable[[Pool], bool]] = {
    "queued": lambda pool: pool.engine.stats().running == 0,
    "after the first prefill chunk": lambda pool: pool.engine.stats().running > 0,
    "just after the first token": lambda pool: pool.outputs() > 0,
    "one before its last token": lambda pool: pool.outputs() >= 11,
    "after it finished": lambda pool: any(delta.last for delta in pool.deltas["gone"]),
    "n=3 half way": lambda pool: pool.outputs() >= 18,
}


@pytest.mark.parametrize("when", ABORTS)
def test_aborts_give_everything_back(when: str, tiny_model_dir: Path) -> None:
    pool = Pool(tiny_model_dir)
    for number in range(8):
        pool.start(number, n=3 if when.startswith("n=3") else 1)
        pool.until(lambda: ABORTS[when](pool))
        assert pool.engine.abort("gone") == (when != "after it finished")
        assert not pool.engine.abort("gone")
        pool.until(lambda: not pool.engine.has_work())
        assert token_ids(pool.deltas["stays"]) == REFS[5]["greedy_40"][:12]
        assert_empty(pool.engine)
    after = run(pool.engine, [request("after", REFS[0]["prompt_ids"], 12)])["after"]
    assert token_ids(after) == REFS[0]["greedy_40"][:12]


def test_one_larger_than_the_pool_is_refused_and_the_others_run(tiny_model_dir: Path) -> None:
    given = case("D01")
    options = {name: given[name] for name in ("max_model_len", "block_size", "num_kv_blocks")}
    engine = engine_for(tiny_model_dir, **options)
    with pytest.raises(RequestError, match=r"at least 80 tokens .* 64") as refused:
        engine.add(request("big", [3 + 7 * index % 500 for index in range(80)], 4))
    assert refused.value.code == ErrorCode.KV_CAPACITY_EXCEEDED
    out = run(engine, [request(f"{ref}", REFS[ref]["prompt_ids"], 8) for ref in (0, 1)])
    assert [token_ids(out[f"{ref}"]) for ref in (0, 1)] == [REFS[ref]["greedy_40"][:8] for ref in (0, 1)]
    assert_empty(engine)


def test_two_bulk_calls_in_one_process(tiny_model_dir: Path) -> None:
    engine = engine_for(tiny_model_dir)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=case("D12")["max_tokens"])
    for call in case("D12")["calls"]:
        results = engine.generate([REFS[ref]["prompt_ids"] for ref in call], params)
        assert [result.choices[0].token_ids for result in results] == [
            REFS[ref]["greedy_40"][: params.max_tokens] for ref in call
        ]
    jobs = [Job(id=f"same-{ref}", prompt=REFS[ref]["prompt_ids"], params=params) for ref in (0, 5)]
    assert [result.id for result in engine.generate(jobs)] == ["same-0", "same-5"]
