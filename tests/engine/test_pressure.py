"""The cases of scheduling and KV on the tiny model: cached, aborted, penalised, too large."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.interface import Delta, Request
from engine.loading import load_engine
from engine.slots import POLICIES
from protocol import ErrorCode, Job, RequestError, SamplingParams
from tests.engine.doubles import assert_empty, case, choices, optimistic, request, run, token_ids
from tests.engine.test_equal_generate import EosMasked, engine_for
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

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given = case("D08")
        self.engine = optimistic(
            engine_for(
                folder,
                block_size=given["block_size"],
                num_kv_blocks=given["num_kv_blocks"],
                max_num_batched_tokens=given["max_num_batched_tokens"],
            )
        )
        self.deltas: dict[str, list[Delta]] = defaultdict(list)
        self.during_forward: Callable[[], object] = lambda: None
        forward = EosMasked.forward

        def hooked(runner: EosMasked, *args: Any) -> Any:
            self.during_forward()
            return forward(runner, *args)

        monkeypatch.setattr(EosMasked, "forward", hooked)

    def start(self, prompt: list[int], others: int, **params: Any) -> None:
        self.deltas.clear()
        self.preemptions = self.engine.stats().preemptions
        self.engine.add(request("gone", prompt, 12, priority=2, **params))
        for ref in range(others):
            self.engine.add(request(f"stays {ref}", REFS[ref]["prompt_ids"], 24))

    def step(self) -> None:
        for delta in self.engine.step():
            self.deltas[delta.request_id].append(delta)
        self.engine.check_integrity()

    def until(self, happened: Callable[[], bool]) -> None:
        for _ in range(200):
            if happened():
                return
            self.step()
        raise AssertionError("it never happened")

    def outputs(self) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas["gone"])

    def abort(self, in_forward: bool) -> None:
        """Twice: the second time nothing is there any more."""
        aborted: list[bool] = []
        if in_forward:
            self.during_forward = lambda: aborted.append(self.engine.abort("gone"))
            self.step()
            self.during_forward = lambda: None
        else:
            aborted.append(self.engine.abort("gone"))
        assert aborted == [not any(delta.last for delta in self.deltas["gone"])]
        assert not self.engine.abort("gone")


ABORTS: dict[str, Callable[[Pool], bool]] = {
    "queued": lambda pool: pool.engine.stats().running == 0,
    "after the first prefill chunk": lambda pool: pool.engine.stats().prompt_tokens > 0,
    "during the forward pass": lambda pool: pool.outputs() >= 1,
    "just after the first token": lambda pool: pool.outputs() >= 1,
    "while preempted": lambda pool: pool.engine.stats().preemptions > pool.preemptions,
    "same step as its last token": lambda pool: pool.outputs() >= 11,
    "twice": lambda pool: pool.outputs() >= 5,
    "after it finished": lambda pool: any(delta.last for delta in pool.deltas["gone"]),
    "n=3 half way": lambda pool: pool.outputs() >= 18,
}


def abort_in_rounds(folder: Path, monkeypatch: pytest.MonkeyPatch, when: str, rounds: int) -> None:
    """Every second round the prompt is in the prefix cache."""
    pool = Pool(folder, monkeypatch)
    for number in range(rounds):
        first = 3 + number // 2 * 9
        pool.start(
            [3 + (first + 7 * place) % 500 for place in range(40)],
            others=6 if when == "while preempted" else 1,
            n=3 if when.startswith("n=3") else 1,
        )
        pool.until(lambda: ABORTS[when](pool))
        pool.abort(in_forward=when in ("during the forward pass", "same step as its last token"))
        told = len(pool.deltas["gone"])
        pool.until(lambda: not pool.engine.has_work())
        assert len(pool.deltas["gone"]) == told, "told of after the abort"
        for name in pool.deltas.keys() - {"gone"}:
            assert token_ids(pool.deltas[name]) == REFS[int(name.split()[1])]["greedy_40"][:24]
        assert_empty(pool.engine)
    after = run(pool.engine, [request("after", REFS[0]["prompt_ids"], 12)])["after"]
    assert token_ids(after) == REFS[0]["greedy_40"][:12]


@pytest.mark.parametrize("when", case("D08")["abort_when"])
def test_aborts_give_everything_back(
    when: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort_in_rounds(tiny_model_dir, monkeypatch, when, rounds=2)


@pytest.mark.long
@pytest.mark.parametrize("when", case("D08")["abort_when"])
def test_aborts_give_everything_back_round_after_round(
    when: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort_in_rounds(tiny_model_dir, monkeypatch, when, rounds=case("D08")["rounds"])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_is_not_starved_by_short_ones(policy: str, tiny_model_dir: Path) -> None:
    given, slots = case("D07"), 4
    options = {name: given[name] for name in ("max_model_len", "block_size", "num_kv_blocks")}
    engine = engine_for(tiny_model_dir, max_num_seqs=slots, admission=policy, **options)
    prompt = [3 + (7 * place) % 500 for place in range(88)]
    (expected,) = run(engine_for(tiny_model_dir), [request("long", prompt, 8)]).values()
    engine.add(request("begun", REFS[0]["prompt_ids"], 24))  # so that the long one does not fit at once
    engine.step()
    engine.add(request("long", prompt, 8))
    shorts, ended = 0, set()
    deltas: list[Delta] = []
    while not (deltas and deltas[-1].last):
        while engine.stats().waiting < 6 and shorts < 200:
            engine.add(request(f"short {shorts}", REFS[0]["prompt_ids"], 24))
            shorts += 1
        for delta in engine.step():
            if delta.request_id == "long":
                deltas.append(delta)
            elif not deltas:
                ended.add(delta.request_id)  # it was let in before the long one
        engine.check_integrity()
    assert token_ids(deltas) == token_ids(expected)
    assert len(ended - {"begun"}) <= (0 if policy == "priority" else 2 * slots)
    assert shorts < 200


def test_one_larger_than_the_pool_is_refused_and_the_others_run(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = case("D01")
    options = {name: given[name] for name in ("max_model_len", "block_size", "num_kv_blocks")}
    engine = load_engine(str(tiny_model_dir), dtype="float32", device="cpu", **options)
    assert "the KV pool holds 64 tokens, less than one sequence of max_model_len 128" in caplog.text
    (big, *others) = given["requests"]
    engine.add(request("first", REFS[0]["prompt_ids"], others[0]["max_tokens"]))
    with pytest.raises(RequestError, match=r"at least 80 tokens .* 64") as refused:
        engine.add(request("big", [3 + 7 * i % 500 for i in range(big["prompt_len"])], big["max_tokens"]))
    assert refused.value.code == ErrorCode.KV_CAPACITY_EXCEEDED
    out = run(
        engine, [request(row["id"], REFS[row["ref"]]["prompt_ids"], row["max_tokens"]) for row in others]
    )
    for row in others:
        assert token_ids(out[row["id"]]) == REFS[row["ref"]]["greedy_40"][: row["max_tokens"]]
    assert_empty(engine)
    assert engine.stats().kv_blocks_total == given["num_kv_blocks"]


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
