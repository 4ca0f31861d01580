"""The engine over a double of the model half: admission to last delta."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import astuple
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from engine.interface import Delta
from protocol import ErrorCode, Job, OptionRefused, RequestError, SamplingParams
from tests.engine.doubles import (
    VOCAB,
    Logits,
    Output,
    PagedDouble,
    alone,
    assert_empty,
    case,
    hashed,
    make_engine,
    optimistic,
    request,
    resumed,
    run,
    scripted,
    tiny,
    tiny_references,
    token_ids,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT_ROWS = [
    pytest.param(row, id=f"{name}-{i}")
    for name in ("A01", "A03", "A05", "A06", "A08", "A10", "A11")
    for i, row in enumerate(case(name)["rows"])
]


@pytest.mark.model
@pytest.mark.parametrize("row", TEXT_ROWS)
def test_text_of_a_scripted_model(row: dict[str, Any], smollm2: Any) -> None:
    vocab = len(smollm2)
    engine = make_engine(PagedDouble(scripted({5: row["script_ids"]}, vocab), vocab), smollm2)
    params = {"ignore_eos": False, "max_tokens": 100, **row["params"]}
    deltas = run(engine, [request("r", [5], **params)])["r"]
    expect = row["expect"]
    joined = ""
    for delta in deltas:
        joined += delta.text
        assert expect["text"].startswith(joined)
        assert delta is deltas[-1] or "\ufffd" not in delta.text
    assert joined == expect["text"]
    assert len(token_ids(deltas)) == expect["completion_tokens"]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (
        expect["finish_reason"],
        expect["stop_reason"],
    )


@pytest.mark.model
@pytest.mark.parametrize("row", case("A12")["rows"], ids=str)
def test_stop_strings_at_the_border_of_the_prompt(row: dict[str, Any], smollm2: Any) -> None:
    vocab = len(smollm2)
    prompt = smollm2.encode(row["prompt"])

    def logits(sequences: list[list[int]]) -> torch.Tensor:
        out = torch.zeros(len(sequences), vocab)
        for at, tokens in enumerate(sequences):
            out[at, row["script_ids"][len(tokens) - len(prompt)]] = 10.0
        return out

    engine = make_engine(PagedDouble(logits, vocab), smollm2)
    if "error" in row["expect"]:
        with pytest.raises(ValidationError, match="stop"):
            request("r", prompt, 9, ignore_eos=False, **row["params"])
        return
    deltas = run(engine, [request("r", prompt, 9, ignore_eos=False, **row["params"])])["r"]
    assert "".join(delta.text for delta in deltas) == row["expect"]["text"]
    assert deltas[-1].stop_reason == row["expect"].get("stop_reason")


@pytest.mark.model
def test_no_end_of_sequence_before_min_tokens(smollm2: Any) -> None:
    vocab = len(smollm2)
    (row,) = [row for row in case("B09")["rows"] if "logits_note" in row]

    def logits(sequences: list[list[int]]) -> torch.Tensor:
        out = torch.zeros(len(sequences), vocab)
        out[:, [0, 2, 665, 26843]] = torch.tensor([10.0, 9.5, 9.0, 8.0])
        return out

    engine = make_engine(PagedDouble(logits, vocab), smollm2, eos=(0, 2))
    deltas = run(engine, [request("r", [5], ignore_eos=False, **row["params"])])["r"]
    assert "".join(delta.text for delta in deltas) == row["text"]
    assert (deltas[-1].finish_reason, len(token_ids(deltas))) == (row["finish"], row["n"])


@pytest.mark.parametrize(
    "row", [row for row in case("B08")["rows"] if isinstance(row["expect"], int)], ids=str
)
def test_max_tokens(row: dict[str, Any]) -> None:
    """The rows without a number are a chat's; what a completions body makes of none is the producer's."""
    asked = {name: value for name, value in row.items() if name.startswith("max") and isinstance(value, int)}
    if row["expect"] == 16:
        asked = {"max_tokens": 16}
    given = case("B08")
    engine = make_engine(PagedDouble(hashed, max_model_len=given["max_model_len"]))
    job = Job(
        id="j", prompt=given["prompt_ids"], params=SamplingParams(temperature=0, ignore_eos=True, **asked)
    )
    (result,) = engine.generate([job])
    assert (len(result.choices[0].token_ids), result.choices[0].finish_reason) == (row["expect"], "length")


@pytest.mark.model
def test_a_character_of_three_tokens_comes_with_the_third(smollm2: Any) -> None:
    script, vocab = case("A01")["rows"][0]["script_ids"], len(smollm2)
    engine = make_engine(PagedDouble(scripted({5: script}, vocab), vocab), smollm2)
    deltas = run(engine, [request("r", [5], 100, ignore_eos=False)])["r"]
    assert [delta.text for delta in deltas[:3]] == ["", "", "\U0001f469"]


@pytest.mark.model
@pytest.mark.parametrize("row", [row for row in case("B09")["rows"] if "script_ids" in row], ids=str)
def test_every_end_of_sequence_id_counts(row: dict[str, Any], smollm2: Any) -> None:
    vocab = len(smollm2)
    config = row.get("generation_config", case("B09")["generation_config"])["eos_token_id"]
    eos = {smollm2.eos_token_id, *(config if isinstance(config, list) else [config])}
    engine = make_engine(PagedDouble(scripted({5: row["script_ids"]}, vocab), vocab), smollm2, sorted(eos))
    params = {"ignore_eos": False, "max_tokens": 50, **row["params"]}
    deltas = run(engine, [request("r", [5], **params)])["r"]
    assert "".join(delta.text for delta in deltas) == row["text"]
    assert (deltas[-1].finish_reason, len(token_ids(deltas))) == (row["finish"], row["n"])


@pytest.mark.model
def test_the_end_of_sequence_has_no_text_even_if_it_is_a_word(smollm2: Any) -> None:
    vocab = len(smollm2)
    engine = make_engine(PagedDouble(scripted({5: [26843, 665]}, vocab), vocab), smollm2, eos=[665])
    (hi, end) = run(engine, [request("r", [5], ignore_eos=False)])["r"]
    assert (hi.text, end.text, end.token_ids, end.finish_reason) == ("Hi", "", [665], "stop")


@pytest.mark.model
@pytest.mark.parametrize("cut", range(19))
def test_a_resumed_request_goes_on_without_a_seam(cut: int, smollm2: Any) -> None:
    row, vocab = case("A01")["rows"][0], len(smollm2)
    logits = scripted({5: row["script_ids"]}, vocab)
    new = request("r", [5], 100, ignore_eos=False)
    first = run(make_engine(PagedDouble(logits, vocab), smollm2), [new])["r"][:cut]
    logged = [token_id for delta in first for token_id in delta.token_ids]
    rest = run(make_engine(PagedDouble(logits, vocab), smollm2), [resumed(new, logged)])["r"]
    assert logged + token_ids(rest) == row["script_ids"]
    assert "".join(delta.text for delta in [*first, *rest]) == row["expect"]["text"]


@pytest.mark.parametrize(
    ("logged", "changes", "reason"),
    [
        ((7, 2), {"ignore_eos": False}, "stop"),
        ((7,) * 8, {}, "length"),
        ((7,) * 63, {"max_tokens": 100}, "length"),
    ],
)
def test_a_resumed_request_that_was_at_its_end_ends(
    logged: tuple[int, ...], changes: Any, reason: str
) -> None:
    runner = PagedDouble(hashed, num_kv_blocks=8)
    engine = make_engine(runner)
    new = resumed(request("r", [5, 6], **changes), logged)
    engine.add(new)
    with pytest.raises(RequestError, match="already here"):
        engine.add(new)
    assert engine.has_work()
    assert engine.step() == [Delta("r", [], "", finish_reason=reason, last=True)]  # type: ignore[arg-type]
    assert runner.steps == []
    assert_empty(engine)
    engine.add(new)
    assert engine.abort("r")
    assert_empty(engine)


def test_sampled_tokens_do_not_depend_on_the_batch_on_preemption_or_on_a_resume() -> None:
    def flat(sequences: list[list[int]]) -> torch.Tensor:
        return hashed(sequences) / 10 + torch.linspace(0, 2, VOCAB)

    requests = [request(f"r{i}", [3 + i] * (5 + i), 20, seed=i, temperature=1.0, top_p=0.9) for i in range(6)]
    roomy = run(make_engine(PagedDouble(flat, num_kv_blocks=100)), requests)
    tight_engine = optimistic(make_engine(PagedDouble(flat, num_kv_blocks=7), max_num_batched_tokens=9))
    tight = run(tight_engine, requests)
    assert tight_engine.stats().preemptions > 0
    for new in requests:
        ids = token_ids(roomy[new.id])
        assert token_ids(tight[new.id]) == ids
        rest = run(make_engine(PagedDouble(flat)), [resumed(new, ids[:7])])
        assert token_ids(rest[new.id]) == ids[7:]
    assert len({tuple(token_ids(roomy[new.id])) for new in requests}) == 6


def test_requests_come_and_go_at_every_step() -> None:
    requests = [request(f"r{i}", [3 + i] * (1 + 7 * i % 40), 3 + i % 13) for i in range(60)]
    engine = make_engine(PagedDouble(hashed, num_kv_blocks=20), max_num_seqs=8, max_num_batched_tokens=32)
    deltas: Output = defaultdict(list)
    for new in requests:
        engine.add(new)
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    for request_id, rest in run(engine).items():
        deltas[request_id] += rest
    assert {new.id: token_ids(deltas[new.id]) for new in requests} == {new.id: alone(new) for new in requests}
    assert_empty(engine)
    stats = engine.stats()
    assert stats.output_tokens == sum(new.max_tokens[0] for new in requests)
    assert stats.prompt_tokens + stats.cached_tokens >= sum(new.num_prompt_tokens for new in requests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_tiny_temperatures_give_the_greedy_ids(dtype: torch.dtype, scale: float) -> None:
    given = case("B02")

    def logits(sequences: list[list[int]]) -> torch.Tensor:
        return (tiny()(sequences) * scale).to(dtype)

    requests = [
        request(f"t{t}", given["prompt_ids"], 20, seed=1, temperature=float(t))
        for t in [*given["temperatures"], 1.0]
    ]
    together = run(make_engine(PagedDouble(logits)), requests)
    greedy = token_ids(together["t0"])
    assert [token_ids(together[new.id]) for new in requests[:-1]] == [greedy] * 5
    assert token_ids(together["t1.0"]) == token_ids(
        run(make_engine(PagedDouble(logits)), requests[-1:])["t1.0"]
    )
    references = {tuple(ref["prompt_ids"]): ref["greedy_40"] for ref in tiny_references()}
    assert greedy == references[tuple(given["prompt_ids"])][:20]


@pytest.mark.parametrize("bad", [[float("nan")] * VOCAB, [float("-inf")] * VOCAB, [float("inf")] * 2])
def test_bad_logits_fail_their_own_request_only(bad: list[float]) -> None:
    references = [tiny_references()[i] for i in (0, 3, 5, 7)]
    broken = references[2]["prompt_ids"]

    def logits(sequences: list[list[int]]) -> torch.Tensor:
        out = tiny()(sequences).clone()
        for row, tokens in enumerate(sequences):
            if tokens[: len(broken)] == broken and len(tokens) == len(broken) + 5:
                out[row, : len(bad)] = torch.tensor(bad)
        return out

    engine = make_engine(PagedDouble(logits))
    deltas = run(engine, [request(str(i), ref["prompt_ids"], 12) for i, ref in enumerate(references)])
    for i in (0, 1, 3):
        assert token_ids(deltas[str(i)]) == references[i]["greedy_40"][:12]
    assert token_ids(deltas["2"]) == references[2]["greedy_40"][:5]
    error = deltas["2"][-1].error
    assert error is not None
    assert error.code == ErrorCode.INVALID_LOGITS
    assert "output token 5" in error.message
    assert_empty(engine)


def test_one_larger_than_the_pool_is_refused_and_those_behind_it_run() -> None:
    engine = make_engine(PagedDouble(tiny(), max_model_len=128, num_kv_blocks=8))
    with pytest.raises(RequestError, match=r"at least 80 tokens .* 64"):
        engine.add(request("big", [3 + 7 * i % 500 for i in range(80)], 4))
    references = tiny_references()
    deltas = run(engine, [request(name, references[i]["prompt_ids"], 8) for i, name in enumerate("ab")])
    assert [token_ids(deltas[name]) for name in "ab"] == [references[i]["greedy_40"][:8] for i in (0, 1)]
    assert_empty(engine)


def test_a_pool_smaller_than_one_sequence_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    make_engine(PagedDouble(hashed, max_model_len=128, num_kv_blocks=8))
    assert "64 tokens" in caplog.text
    assert "128" in caplog.text


def test_alone_it_fills_the_pool_and_ends_by_length() -> None:
    deltas = run(make_engine(PagedDouble(hashed, num_kv_blocks=2)), [request("r", [5] * 10, 100)])["r"]
    assert len(token_ids(deltas)) == 16 - 10 + 1
    assert deltas[-1].finish_reason == "length"


@pytest.mark.parametrize("budget", [1, 7, 8, 16, 17, 33, 64])
def test_any_budget_gives_the_same_tokens_and_decodes_go_on(budget: int) -> None:
    references = [tiny_references()[i] for i in (10, 0, 5, 9)]
    runner = PagedDouble(tiny())
    engine = make_engine(runner, max_num_batched_tokens=budget)
    deltas = run(engine, [request(str(i), ref["prompt_ids"], 20) for i, ref in enumerate(references)])
    assert [token_ids(deltas[str(i)]) for i in range(4)] == [ref["greedy_40"][:20] for ref in references]
    assert all(sum(step.sizes) <= budget for step in runner.steps)
    assert max(max(step.sizes) for step in runner.steps) <= budget


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    engine = make_engine(PagedDouble(hashed, max_model_len=128, num_kv_blocks=14), max_num_seqs=4)
    long = request("long", [3 + 7 * i % 500 for i in range(88)], 8)
    running = [request(f"early{i}", [40 + i] * 9, 24) for i in range(2)]
    for new in running:
        engine.add(new)
    engine.step()
    engine.add(long)
    deltas: Output = defaultdict(list)
    first_token: list[str] = []
    added = 0
    while engine.has_work() or added < 200:
        while added < 200 and engine.stats().waiting < 6:
            engine.add(
                request(f"short{added}", [100 + added] * 9, 24 - added % 7)
            )  # they must not all end at once
            added += 1
        for delta in engine.step():
            if delta.request_id not in deltas:
                first_token.append(delta.request_id)
            deltas[delta.request_id].append(delta)
    shorts_before = [name for name in first_token[: first_token.index("long")] if name.startswith("short")]
    assert len(shorts_before) <= 2 * 4
    assert token_ids(deltas["long"]) == alone(long)
    assert len(deltas) == 203


def test_a_forward_pass_that_fails_is_for_the_process_to_handle() -> None:
    def broken(sequences: list[list[int]]) -> torch.Tensor:
        raise RuntimeError(f"kernel died on {len(sequences)}")

    logits: Logits = broken
    engine = make_engine(PagedDouble(logits))
    engine.add(request("r", [5]))
    with pytest.raises(RuntimeError, match="kernel died"):
        engine.step()


def test_an_idle_step_computes_nothing() -> None:
    runner = PagedDouble(hashed)
    assert make_engine(runner).step() == []
    assert runner.steps == []


def test_the_counters_add_up() -> None:
    requests = [request(f"r{i}", [3 + i] * 10, 30) for i in range(6)]
    engine = optimistic(make_engine(PagedDouble(hashed, num_kv_blocks=9), max_num_batched_tokens=16))
    began = time.perf_counter()
    run(engine, requests)
    elapsed = time.perf_counter() - began
    stats = engine.stats()
    assert stats.output_tokens == 6 * 30
    assert stats.prompt_tokens + stats.cached_tokens >= 6 * 10
    assert stats.preemptions > 0
    assert stats.recomputed_tokens > 0
    assert stats.evictions > 0
    parts = astuple(stats.seconds)
    assert all(part > 0 for part in parts)
    assert sum(parts) <= elapsed


def test_how_much_of_what_is_held_is_of_use() -> None:
    """Four steps of one sequence: 9, 10, 11 and 12 tokens in two blocks of 8."""
    engine = make_engine(PagedDouble(hashed), max_num_seqs=2)
    run(engine, [request("r", [5] * 9, 4)])
    stats = engine.stats()
    assert (stats.steps, stats.slot_steps, stats.slots) == (4, 4, 2)
    assert stats.kv_tokens_allocated == 4 * 16
    assert stats.kv_tokens_unused == 7 + 6 + 5 + 4
    assert stats.padding_rows == 0


def test_tokens_of_a_shared_block_are_not_unused() -> None:
    """Two choices of a prompt of 17: the first computes it, the second shares its two full blocks."""
    engine = make_engine(PagedDouble(hashed), max_num_seqs=2)
    run(engine, [request("r", [5] * 17, 2, n=2)])
    stats = engine.stats()
    blocks = [3, 4, 3]  # the first alone; both; the second alone
    assert stats.kv_tokens_allocated == 8 * sum(blocks)
    assert stats.kv_tokens_unused == 7 + (6 + 7) + 6
    assert stats.cached_tokens == 16


def test_slots_and_tokens_a_step_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(OptionRefused, match=r"give max_num_batched_tokens 8, or max_num_seqs 7"):
        make_engine(PagedDouble(hashed), max_num_seqs=8, max_num_batched_tokens=7)
    with pytest.raises(OptionRefused, match=r"max_num_seqs is 0"):
        make_engine(PagedDouble(hashed), max_num_seqs=0)


@pytest.mark.parametrize(
    ("given", "slots"),
    [({}, 128), ({"max_num_batched_tokens": 7}, 7), ({"max_num_seqs": 600}, 600)],
    ids=str,
)
def test_what_is_not_given_of_slots_and_tokens_a_step_is_fitted(given: dict[str, int], slots: int) -> None:
    assert make_engine(PagedDouble(hashed, num_kv_blocks=200), **given).max_num_seqs == slots


def test_the_runner_s_padding_and_graphs_count() -> None:
    runner = PagedDouble(hashed)
    runner.num_padding_rows, runner.num_replays = 3, 7
    stats = make_engine(runner).stats()
    assert (stats.padding_rows, stats.graph_steps) == (3, 7)
