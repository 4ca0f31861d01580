"""A step launched before the last one's tokens are read gives what steps one after the other give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.interface import Delta, Request
from engine.sampling import Drawn, Sampled
from protocol import SamplingParams
from tests.engine.doubles import (
    VOCAB,
    Output,
    PagedDouble,
    assert_empty,
    hashed,
    make_engine,
    optimistic,
    request,
    run,
    token_ids,
)

# Collected again here, with overlap.
from tests.engine.test_abort import test_an_abort_in_any_state_frees_everything  # noqa: F401
from tests.engine.test_alone_or_not import (  # noqa: F401
    test_a_row_that_fails_leaves_the_others_as_they_were,
)
from tests.engine.test_choices import (  # noqa: F401
    flat,
    test_a_choice_that_fails_ends_its_request_and_no_other,
    test_a_resumed_choice_that_lacked_only_its_end,
    test_a_resumed_request_goes_on_with_the_choices_that_have_not_ended,
    test_an_abort_frees_all_choices,
    test_choices_differ_are_made_again_and_obey_every_rule,
    test_shared_prefixes_and_choices_give_what_each_gives_alone,
)
from tests.engine.test_engine import (  # noqa: F401
    test_alone_it_fills_the_pool_and_ends_by_length,
    test_any_budget_gives_the_same_tokens_and_decodes_go_on,
    test_bad_logits_fail_their_own_request_only,
    test_requests_come_and_go_at_every_step,
    test_sampled_tokens_do_not_depend_on_the_batch_on_preemption_or_on_a_resume,
)
from tests.engine.test_equal_generate import TINY, drive, engine_for
from tests.engine.test_logprobs import (  # noqa: F401
    test_every_token_has_one_entry,
    test_those_of_a_prompt_in_chunks_beside_others,
    test_those_of_a_prompt_that_is_preempted_on_its_way,
)
from tests.models import byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedDouble, "is_asynchronous", True)


@dataclass
class Watched:
    """An engine, and in what order it launches forward passes and reads what was drawn after each."""

    engine: Engine
    events: list[str]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    events: list[str] = []
    read = Drawn.read

    def noted(drawn: Drawn) -> Sampled:
        events.append("read")
        return read(drawn)

    monkeypatch.setattr(Drawn, "read", noted)
    runner = PagedDouble(hashed)
    runner.before_forward = lambda: events.append("forward")
    return Watched(make_engine(runner), events)


def test_tokens_are_read_when_the_next_step_is_launched(watched: Watched) -> None:
    deltas = run(watched.engine, [request("a", [5] * 9, 4), request("b", [6] * 9, 3)])
    assert watched.events == ["forward", *["forward", "read"] * 3, "read"]
    assert [len(token_ids(deltas[name])) for name in "ab"] == [4, 3]


def test_without_overlap_they_are_read_at_once(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedDouble, "is_asynchronous", False)
    runner = PagedDouble(hashed)
    runner.before_forward = lambda: watched.events.append("forward")
    run(make_engine(runner), [request("a", [5] * 9, 4)])
    assert watched.events == ["forward", "read"] * 4


def test_the_slot_of_one_that_ends_by_its_length_is_taken_in_the_next_step() -> None:
    runner = PagedDouble(hashed)
    engine = make_engine(runner, max_num_seqs=1)
    run(engine, [request(name, [5 + len(name)] * 4, 3) for name in ("a", "bb", "ccc")])
    assert [step.sizes for step in runner.steps] == [[4], [1], [1]] * 3
    assert engine.stats().padding_rows == 0


def test_the_row_of_one_that_has_ended_unseen_is_thrown_away() -> None:
    def ends_at_the_third(sequences: list[list[int]]) -> torch.Tensor:
        out = hashed(sequences)
        for row, tokens in enumerate(sequences):
            out[row, 2] = 20.0 if len(tokens) == 6 else 0.0
        return out

    runner = PagedDouble(ends_at_the_third)
    engine = make_engine(runner)
    deltas = run(engine, [request("r", [5] * 4, 30, ignore_eos=False)])["r"]
    assert [len(delta.token_ids) for delta in deltas] == [1, 1, 1]
    assert (deltas[-1].finish_reason, token_ids(deltas)[-1]) == ("stop", 2)
    assert engine.stats().padding_rows == 1
    assert engine.stats().output_tokens == 3
    assert_empty(engine)


def test_no_block_is_known_by_a_token_that_has_not_been_read() -> None:
    """Block size 1: each token fills a block, and the second request shares every one that is known."""
    engine = make_engine(PagedDouble(hashed, block_size=1, num_kv_blocks=64))
    first = token_ids(run(engine, [request("a", [5] * 4, 8)])["a"])
    cached = engine.stats().cached_tokens
    again = run(engine, [request("b", [5] * 4 + first[:6], 2)])["b"]
    assert token_ids(again) == first[6:8]
    assert engine.stats().cached_tokens - cached == 4 + 5
    assert token_ids(run(engine, [request("zero", [5] * 4 + [0], 3)])["zero"]) == token_ids(
        run(make_engine(PagedDouble(hashed)), [request("zero", [5] * 4 + [0], 3)])["zero"]
    )


@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 20}, {"max_num_batched_tokens": 7}], ids=str)
def test_a_real_model_gives_what_generate_gives(tiny_model_dir: Path, options: dict[str, Any]) -> None:
    engine = optimistic(engine_for(tiny_model_dir, block_size=8, overlap=True, **options))
    requests = [request(f"{index}", row["prompt_ids"], 40) for index, row in enumerate(TINY)]
    out = drive(engine, requests, [index // 2 for index in range(12)])
    assert [out[f"{index}"] for index in range(12)] == [row["greedy_40"] for row in TINY]
    assert (engine.stats().preemptions > 0) == ("num_kv_blocks" in options)
    assert_empty(engine)


class OddOrEven:
    """A grammar whose tokens take turns: odd, even. Implements `engine.interface.Grammar` and `Matcher`."""

    def __init__(self) -> None:
        self._next = 1

    def matcher(self) -> OddOrEven:
        return OddOrEven()

    def allowed(self, mask: Any) -> None:
        mask[:] = (
            -1431655766 if self._next else 1431655765
        )  # 0xAAAAAAAA: the odd ids; 0x55555555: the even ones

    def push(self, token_id: int) -> None:
        assert token_id % 2 == self._next, "a token drawn before the grammar knew the last one"
        self._next = 1 - self._next


PARAMS: list[dict[str, Any]] = [
    {},
    {"ignore_eos": False},
    {"temperature": 1.0, "ignore_eos": False},
    {"temperature": 1.0, "top_p": 0.9, "n": 2, "ignore_eos": False},
    {"temperature": 1.0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.7, "n": 3, "logprobs": 2},
    {"temperature": 1.0, "stop": list("abcdefghijklmnopqrs"), "min_tokens": 2},
    {"prompt_logprobs": 1, "ignore_eos": False},
    {"bad_words": ["a"], "temperature": 1.0},
]
NEW = st.tuples(
    st.sampled_from([[3, 4, 5, 6], [3, 4, 9, 9], [7]]),
    st.integers(1, 26),  # tokens of the prompt
    st.integers(1, 12),  # max_tokens
    st.sampled_from(PARAMS),
    st.booleans(),  # under a grammar
)
STORIES = {
    "actions": st.lists(
        st.one_of(NEW, NEW, st.integers(1, 6), st.tuples(st.just("abort"), st.integers(0, 5))), max_size=14
    ),
    "pool": st.sampled_from([(1, 45), (4, 7), (4, 11), (8, 8), (8, 40)]),
    "budget": st.sampled_from([4, 9, 64]),
    "tight": st.booleans(),
}


@dataclass
class Told:
    """What came back of a story."""

    choices: dict[tuple[str, int], list[Delta]]
    aborted: set[str]
    engine: Engine


def tell(
    actions: list[Any],
    pool: tuple[int, int],
    budget: int,
    tight: bool,
    overlap: bool,
    prepare: Callable[[Engine], None] = lambda _: None,
) -> Told:
    block_size, num_kv_blocks = pool
    runner = PagedDouble(flat, block_size=block_size, num_kv_blocks=num_kv_blocks)
    engine = make_engine(
        runner,
        byte_tokenizer(VOCAB),
        range(440, 500),  # one in six or so ends an output
        max_num_batched_tokens=budget,
        max_num_seqs=min(4, budget),
        overlap=overlap,
    )
    if tight:
        optimistic(engine)
    prepare(engine)
    deltas: Output = defaultdict(list)
    aborted = set()

    def step() -> None:
        for delta in engine.step():
            assert delta.request_id not in aborted, "told after its abort"
            deltas[delta.request_id].append(delta)
        engine.check_integrity()

    for number, action in enumerate(actions):
        if isinstance(action, int):
            for _ in range(action):
                step()
        elif action[0] == "abort":
            if engine.abort(name := f"r{number - 1 - action[1]}"):
                aborted.add(name)
        else:
            engine.add(_new(f"r{number}", number, *action))
    while engine.has_work():
        step()
    assert_empty(engine)
    told = defaultdict(list)
    for each in deltas.values():
        for delta in each:
            told[delta.request_id, delta.choice].append(delta)
    return Told(told, aborted, engine)


def _new(
    name: str, seed: int, start: list[int], length: int, most: int, params: dict[str, Any], ruled: bool
) -> Request:
    prompt = (*(start * 26)[: length - 1], 100 + seed % 2)
    given_ = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
    new = Request(name, (prompt,), given_, seed, (most,))
    return replace(new, grammar=OddOrEven()) if ruled else new


def plain(deltas: list[Delta]) -> list[Any]:
    """Deltas without what depends on when the other choices of the request ended."""
    return [replace(delta, last=False) for delta in deltas]


def check_story(**drawn: Any) -> None:
    one_by_one, ahead = tell(**drawn, overlap=False), tell(**drawn, overlap=True)
    assert_same_story(one_by_one, ahead)


def assert_same_story(one_by_one: Told, ahead: Told) -> None:
    """What was told of each choice is the same, up to where one of the two was aborted."""
    for key in one_by_one.choices.keys() | ahead.choices.keys():
        expected, got = plain(one_by_one.choices.get(key, [])), plain(ahead.choices.get(key, []))
        if key[0] in one_by_one.aborted | ahead.aborted:
            expected = expected[: len(got)]
            got = got[: len(expected)]
        assert got == expected, key
    assert ahead.engine.stats().kv_blocks_used == 0


@settings(max_examples=25, deadline=None)
@given(**STORIES)
def test_any_story_is_told_the_same(**drawn: Any) -> None:
    check_story(**drawn)


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@given(**STORIES)
def test_any_story_is_told_the_same_at_length(**drawn: Any) -> None:
    check_story(**drawn)


@pytest.mark.parametrize("end", ["eos", "abort"])
def test_a_pause_is_not_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """With a bound on a step's time, what comes after a long pause finds the budget as it was."""
    now = 0.0
    monkeypatch.setattr("engine.loop.perf_counter", lambda: now)
    runner = PagedDouble(hashed, num_kv_blocks=100)
    engine = make_engine(runner, overlap=True, max_step_ms=500, eos=range(VOCAB))
    engine.add(request("first", [5] * 20, 8, ignore_eos=end == "abort"))
    for _ in range(3):
        engine.step()
    engine.abort("first")
    assert not engine.has_work()
    now += 60.0
    engine.add(request("second", [6] * 200, 2))
    while engine.has_work():
        engine.step()
    assert max(step.sizes[0] for step in runner.steps[-3:]) == 200
    assert engine._loop._pace.budget == 512
