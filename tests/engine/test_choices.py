"""Several choices of a prompt, several prompts of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interface import Delta, Request, Written
from protocol import Job, SamplingParams
from tests.engine.doubles import (
    VOCAB,
    PagedDouble,
    alone,
    assert_empty,
    case,
    choices,
    hashed,
    make_engine,
    request,
    resumed,
    run,
    scripted,
    tiny,
    token_ids,
)
from tests.models import byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


def flat(sequences: list[list[int]]) -> torch.Tensor:
    """As `hashed`, with a distribution that leaves something to draw."""
    return hashed(sequences) / 10 + torch.linspace(0, 2, VOCAB)


def several(
    name: str, prompts: list[list[int]], max_tokens: int = 8, seed: int = 0, **params: Any
) -> Request:
    params = {"temperature": 0.0, "ignore_eos": True, **params}
    prompt_ids = tuple(map(tuple, prompts))
    return Request(name, prompt_ids, SamplingParams(**params), seed, (max_tokens,) * len(prompts))


def test_choices_differ_are_made_again_and_obey_every_rule() -> None:
    """B07, on the tiny model."""
    given_ = case("B07")
    params = {name: value for name, value in given_["params"].items() if name not in ("max_tokens", "seed")}
    new = several("r", [given_["prompt_ids"]], 12, given_["params"]["seed"], **params)
    runner = PagedDouble(tiny())
    engine = make_engine(runner)
    first = choices(run(engine, [new])["r"])
    assert {index: len(ids) for index, ids in first.items()} == dict.fromkeys(range(4), 12)
    assert len({tuple(ids) for ids in first.values()}) == 4
    assert all(173 not in ids for ids in first.values())
    assert (engine.stats().prompt_tokens, engine.stats().output_tokens) == (
        16 + 3,
        48,
    )  # one token anew a follower
    busy = [request(f"other{i}", [9 + i] * (3 + i), 12, seed=i, temperature=1.0) for i in range(4)]
    assert choices(run(engine, [*busy[:2], new, *busy[2:]])["r"]) == first

    greedy = several("g", [given_["prompt_ids"]], 12, n=given_["greedy"]["n"])
    same = choices(run(engine, [greedy])["g"])
    assert same[0][0] == 173
    assert same[0] == same[1] == same[2]
    assert_empty(engine)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_frees_all_choices(steps: int) -> None:
    engine = make_engine(PagedDouble(hashed), max_num_seqs=3)
    engine.add(several("r", [[5] * 20, [6] * 9], n=4))
    for _ in range(steps):
        engine.step()
    assert engine.abort("r")
    assert_empty(engine)


def test_a_choice_depends_on_seed_number_and_place_alone() -> None:
    """Whatever n is: choice 2 of four is choice 2 of three."""
    params = {"temperature": 1.0, "top_p": 0.95}
    four = choices(run(make_engine(PagedDouble(flat)), [several("r", [[5] * 9], n=4, seed=3, **params)])["r"])
    three = choices(
        run(make_engine(PagedDouble(flat)), [several("r", [[5] * 9], n=3, seed=3, **params)])["r"]
    )
    assert three == {index: four[index] for index in range(3)}


def test_prompts_of_a_request_are_answered_in_order() -> None:
    prompts = [[5, 6], [7], [8] * 20]
    engine = make_engine(PagedDouble(hashed))
    out = choices(run(engine, [several("r", prompts, n=2)])["r"])
    for index in range(6):
        assert out[index] == alone(request("r", prompts[index // 2], 8)), index
    assert engine.stats().prompt_tokens == 23 + 3
    assert_empty(engine)


def test_a_job_with_several_prompts() -> None:
    engine = make_engine(PagedDouble(hashed))
    params = SamplingParams(temperature=0, max_tokens=4, n=2, ignore_eos=True)
    (result,) = engine.generate([Job(id="j", prompt=[[5, 6], [7]], params=params)])
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
    assert [choice.finish_reason for choice in result.choices] == ["length"] * 4
    assert result.usage is not None
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 16)
    assert result.choices[0].token_ids == result.choices[1].token_ids == alone(request("r", [5, 6], 4))


def test_a_choice_that_fails_ends_its_request_and_no_other() -> None:
    def logits(sequences: list[list[int]]) -> torch.Tensor:
        out = flat(sequences)
        for row, tokens in enumerate(sequences):
            if tokens[0] == 5 and len(tokens) == 12:
                out[row] = torch.nan
                return out  # the first of them alone
        return out

    other = request("other", [6] * 9, 12)
    engine = make_engine(PagedDouble(logits))
    deltas = run(engine, [several("r", [[5] * 9], n=3), other])
    ends = [delta for delta in deltas["r"] if delta.error is not None]
    assert len(ends) == 1
    assert deltas["r"][-1] is ends[0]
    assert ends[0].last
    assert token_ids(deltas["other"]) == token_ids(run(make_engine(PagedDouble(flat)), [other])["other"])
    assert_empty(engine)


@pytest.mark.parametrize("ended", [(), (0,), (1,), (0, 2), (0, 1, 2)])
def test_a_resumed_request_goes_on_with_the_choices_that_have_not_ended(ended: tuple[int, ...]) -> None:
    new = several("r", [[5] * 9], 12, seed=7, n=3, temperature=1.0)
    whole = choices(run(make_engine(PagedDouble(flat)), [new])["r"])
    logged = [
        Written(tuple(whole[index][: 12 if index in ended else 4 + index]), index in ended)
        for index in range(3)
    ]
    engine = make_engine(PagedDouble(flat, num_kv_blocks=8), max_num_batched_tokens=7)
    rest = run(engine, [resumed(new, *logged)])["r"]
    assert rest[-1].last
    if len(ended) == 3:
        assert rest == [Delta("r", [], "", last=True)]
        return
    assert {index: [*logged[index].token_ids, *ids] for index, ids in choices(rest).items()} == {
        index: ids for index, ids in whole.items() if index not in ended
    }
    assert_empty(engine)


def test_a_resumed_choice_that_lacked_only_its_end() -> None:
    new = several("r", [[5] * 9], 4, n=2)
    whole = choices(run(make_engine(PagedDouble(hashed)), [new])["r"])
    engine = make_engine(PagedDouble(hashed))
    rest = run(engine, [resumed(new, whole[0], whole[1][:2])])["r"]
    assert choices(rest) == {0: [], 1: whole[1][2:]}
    assert_empty(engine)


@pytest.mark.parametrize(("stop", "ending"), [("abc", ("ab", "length")), ("zz", ("", "length"))])
def test_a_resumed_choice_whose_limit_has_shrunk_loses_no_text(stop: str, ending: tuple[str, str]) -> None:
    """The next worker's context is shorter: what was held back for a stop string is told with the end."""
    tokenizer = byte_tokenizer(VOCAB)
    script = tokenizer.encode("xyabzz", add_special_tokens=False)
    logits = scripted({5: script}, VOCAB)
    new = request("r", [5], 6, stop=[stop])
    first = make_engine(PagedDouble(logits), tokenizer)
    first.add(new)
    sent = "".join(delta.text for _ in range(4) for delta in first.step())
    shorter = resumed(replace(new, max_tokens=(4,)), script[:4])
    (last,) = run(make_engine(PagedDouble(logits), tokenizer), [shorter])["r"]
    assert (last.text, last.finish_reason) == ending
    assert sent + last.text == "xyab"


ROWS = st.lists(
    st.tuples(
        st.sampled_from([[3, 4, 5, 6], [3, 4, 9, 9], [7]]),  # how the prompt begins, repeated
        st.integers(1, 30),  # tokens of the prompt
        st.integers(1, 12),  # max_tokens
        st.sampled_from([1, 1, 2, 3]),  # n
    ),
    min_size=1,
    max_size=6,
)
ENGINES = {
    "rows": ROWS,
    "block_size": st.sampled_from([1, 4, 8]),
    "tokens_of_room": st.sampled_from([45, 64, 200]),
    "budget": st.sampled_from([4, 9, 64]),
}


def check_shared_prefixes(rows: Any, block_size: int, tokens_of_room: int, budget: int) -> None:
    requests = []
    for number, (start, length, max_tokens, n) in enumerate(rows):
        prompt = [*(start * 30)[: length - 1], 100 + number % 2]
        requests.append(several(f"r{number}", [prompt], max_tokens, seed=number, n=n, temperature=1.0))
    runner = PagedDouble(flat, block_size=block_size, num_kv_blocks=-(-tokens_of_room // block_size))
    engine = make_engine(runner, max_num_batched_tokens=budget, max_num_seqs=min(4, budget))
    whole = {
        new.id: run(make_engine(PagedDouble(flat, num_kv_blocks=100)), [new])[new.id] for new in requests
    }
    for _ in range(2):  # the second time with all of it in the cache, or with what was not evicted
        deltas = run(engine, requests)
        assert {new.id: choices(deltas[new.id]) for new in requests} == {
            name: choices(made) for name, made in whole.items()
        }
        assert_empty(engine)


@settings(max_examples=12, deadline=None)
@given(**ENGINES)
def test_shared_prefixes_and_choices_give_what_each_gives_alone(**drawn: Any) -> None:
    check_shared_prefixes(**drawn)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(**ENGINES)
def test_shared_prefixes_and_choices_give_what_each_gives_alone_at_length(**drawn: Any) -> None:
    check_shared_prefixes(**drawn)
