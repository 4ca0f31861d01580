"""Log-probabilities through the engine: whole, in order, and the same however the prompt was computed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from protocol import Job, SamplingParams, TokenLogprob
from tests.engine.doubles import (
    Logits,
    PagedDouble,
    case,
    make_engine,
    optimistic,
    request,
    resumed,
    run,
    tiny,
    tiny_references,
    token_ids,
)
from tests.engine.test_choices import flat, several

pytestmark = pytest.mark.usefixtures("one_thread")


def strictly(value: Any) -> Any:
    """Through JSON that knows neither NaN nor Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in the output")

    return json.loads(json.dumps(value), parse_constant=refuse)


def expected(logits: Logits, prompt: list[int], top: int) -> list[Any]:
    """Of each prompt token: id, log-probability and the likeliest ids, from a forward pass over each prefix."""
    rows = [torch.log_softmax(logits([prompt[:end]])[0].double(), -1) for end in range(1, len(prompt))]
    return [
        None,
        *(
            (token_id, row[token_id].item(), row.topk(top).indices.tolist())
            for row, token_id in zip(rows, prompt[1:], strict=True)
        ),
    ]


def check(told: list[TokenLogprob | None] | None, wanted: list[Any]) -> None:
    assert told is not None
    assert len(told) == len(wanted)
    assert told[0] is None
    for one, (token_id, logprob, likeliest) in zip(told[1:], wanted[1:], strict=True):
        assert one is not None
        assert one["token_id"] == token_id
        assert one["logprob"] == pytest.approx(logprob, abs=1e-5)
        assert [top["token_id"] for top in one["top_logprobs"]] == likeliest


PROMPT = tiny_references()[5]["prompt_ids"][:12]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5, "max_num_seqs": 3},
        {"max_num_batched_tokens": 2, "max_num_seqs": 2},
    ],
    ids=str,
)
def test_those_of_a_prompt_in_chunks_beside_others(options: dict[str, Any]) -> None:
    engine = make_engine(PagedDouble(tiny()), **options)
    other = request("other", tiny_references()[0]["prompt_ids"], 6)
    new = request("r", PROMPT, 3, prompt_logprobs=4)
    for _ in range(2):  # the second time its KV is in the cache, which knows no logits
        deltas = run(engine, [other, new])
        first, *rest = deltas["r"]
        check(strictly(first.prompt_logprobs), expected(tiny(), PROMPT, 4))
        assert all(delta.prompt_logprobs is None for delta in rest)
        assert token_ids(deltas["other"]) == tiny_references()[0]["greedy_40"][:6]


def test_those_of_a_prompt_that_is_preempted_on_its_way() -> None:
    runner = PagedDouble(flat, num_kv_blocks=6, block_size=4)
    engine = optimistic(make_engine(runner, max_num_batched_tokens=2, max_num_seqs=2))
    long = [3 + i for i in range(14)]
    out = run(engine, [request("first", [70] * 3, 14, priority=0), request("r", long, 2, prompt_logprobs=2)])
    assert engine.stats().preemptions > 0
    check(out["r"][0].prompt_logprobs, expected(flat, long, 2))


def test_each_prompt_is_told_once_with_its_first_choice() -> None:
    engine = make_engine(PagedDouble(flat))
    out = run(engine, [several("r", [[5, 6, 7], [8]], 4, n=2, prompt_logprobs=1, temperature=1.0)])["r"]
    told = {delta.choice: delta.prompt_logprobs for delta in out if delta.prompt_logprobs is not None}
    assert set(told) == {0, 2}
    check(told[0], expected(flat, [5, 6, 7], 1))
    assert told[2] == [None]


def test_a_resumed_request_does_not_tell_its_prompt_again() -> None:
    new = request("r", PROMPT, 3, prompt_logprobs=0)
    (rest, *_) = run(make_engine(PagedDouble(tiny())), [resumed(new, [7])])["r"]
    assert rest.prompt_logprobs is None


@pytest.mark.parametrize("row", case("B06")["rows"], ids=str)
def test_every_token_has_one_entry(row: dict[str, Any]) -> None:
    given = case("B06")
    params = SamplingParams(max_tokens=given["max_tokens"], ignore_eos=True, **row)
    engine = make_engine(PagedDouble(tiny()))
    (result,) = engine.generate([Job(id="j", prompt=given["prompt_ids"], params=params)])
    (choice,) = strictly(json.loads(result.encode()))["choices"]
    assert len(choice["logprobs"]) == len(choice["token_ids"]) == given["max_tokens"]
    for token_id, told in zip(choice["token_ids"], choice["logprobs"], strict=True):
        assert told["token_id"] == token_id
        assert -9999.0 <= told["logprob"] <= 0
        top = [one["logprob"] for one in told["top_logprobs"]]
        assert len(top) == row["top_logprobs"]
        assert top == sorted(top, reverse=True)
        assert torch.tensor(top).exp().sum() <= 1.0001
        assert told["rank"] >= 1


@pytest.mark.model
def test_tokens_are_told_with_their_text(smollm2: Any) -> None:
    vocab = len(smollm2)

    def logits(sequences: list[list[int]]) -> torch.Tensor:
        out = torch.zeros(len(sequences), vocab)
        out[:, 7042], out[:, 10813] = 9.0, 8.0
        return out

    (delta,) = run(make_engine(PagedDouble(logits, vocab), smollm2), [request("r", [5], 1, logprobs=2)])["r"]
    assert delta.logprobs is not None
    (told,) = delta.logprobs
    assert told["token"] == " Paris"
    assert [top["token"] for top in told["top_logprobs"]] == [" Paris", "�"]
