"""What a request's parameters do to its logits, beside rows that have other rules or none."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import Draw, Rules, adjust, rules_for, sample
from protocol import ErrorCode, RequestError, SamplingParams
from tests.engine.doubles import case
from tests.engine.sampling.reference import ruled, rules

pytestmark = pytest.mark.usefixtures("one_thread")


class Only:
    """A grammar that always allows the same ids. Implements `engine.interface.Matcher`."""

    def __init__(self, allowed: Collection[int], error: Exception | None = None) -> None:
        self.ids, self.error = allowed, error
        self.pushed: list[int] = []

    def allowed(self, mask: npt.NDArray[np.int32]) -> None:
        if self.error is not None:
            raise self.error
        flags = np.zeros(len(mask) * 32, dtype=bool)
        flags[list(self.ids)] = True
        mask[:] = np.packbits(flags, bitorder="little").view(np.int32)

    def push(self, token_id: int) -> None:
        self.pushed.append(token_id)


@dataclass
class Row:
    """One row with all its rules come from."""

    logits: torch.Tensor
    params: SamplingParams
    prompt: list[int]
    output: list[int]
    end_ids: frozenset[int]
    bad_words: list[tuple[int, ...]]
    grammar: frozenset[int] | None

    def rules(self, replayed: int) -> Rules | None:
        """Its rules, of which some output was written by an earlier attempt and the rest by this one."""
        made = rules_for(
            self.params,
            self.prompt,
            len(self.logits),
            end_ids=self.end_ids,
            bad_words=self.bad_words,
            matcher=None if self.grammar is None else Only(self.grammar),
            output_token_ids=self.output[:replayed],
        )
        for token_id in self.output[replayed:] if made else ():
            made.push(token_id)
        return made

    def expected(self) -> list[float]:
        return ruled(
            self.logits.tolist(),
            self.params,
            self.prompt,
            self.output,
            self.end_ids,
            self.bad_words,
            self.grammar,
        )


def rows(vocab: int) -> st.SearchStrategy[Row]:
    """Rows with any mix of rules, half of them plain."""
    ids = st.integers(0, vocab - 1)
    few = st.lists(ids, max_size=6)
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1.0]),
        top_p=st.sampled_from([1.0, 0.9]),
        repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
        frequency_penalty=st.sampled_from([0.0, -0.5, 1.25]),
        presence_penalty=st.sampled_from([0.0, 0.75, -2.0]),
        logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=4),
        allowed_token_ids=st.none() | st.lists(ids, min_size=1, max_size=20),
        min_tokens=st.integers(0, 8),
    )
    plain = st.builds(SamplingParams, temperature=st.sampled_from([0.0, 1.0]))
    logits = st.integers(0, 2**32).map(
        lambda seed: torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3
    )
    words = st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4)
    grammar = st.none() | st.frozensets(ids, min_size=1)
    full = st.builds(Row, logits, params, few, few, st.frozensets(ids, max_size=3), words, grammar)
    bare = st.builds(Row, logits, plain, few, few, st.frozensets(ids, max_size=3), st.just([]), st.just(None))
    return full | bare


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([5, 31, 64, 100]).flatmap(lambda vocab: st.lists(rows(vocab), min_size=1, max_size=5)),
    st.integers(0, 6),
)
def test_rules_are_those_of_the_reference_whatever_the_neighbours_have(
    batch: list[Row], replayed: int
) -> None:
    made = [row.rules(replayed) for row in batch]
    with_rules = [place for place, each in enumerate(made) if each is not None]
    x = torch.stack([row.logits for row in batch])[with_rules]
    assert adjust.apply(x, [each for each in made if each is not None]) == [None] * len(with_rules)
    for place, row in enumerate(batch):
        expected = torch.tensor(row.expected())
        actual = x[with_rules.index(place)] if place in with_rules else row.logits
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)

    draws = [
        Draw(row.params, place, 0, len(row.output), each)
        for place, (row, each) in enumerate(zip(batch, made, strict=True))
    ]
    together = sample(torch.stack([row.logits for row in batch]), draws)
    for place, row in enumerate(batch):
        alone = sample(row.logits.unsqueeze(0), [draws[place]])
        assert together.problems[place] == alone.problems[0]
        left = [token_id for token_id, x in enumerate(row.expected()) if x > -math.inf]
        assert (together.problems[place] == "no_candidates") == (not left)
        if left:
            assert together.token_ids[place] == alone.token_ids[0]
            assert together.token_ids[place] in left


def test_penalties_as_they_are_defined_beside_a_plain_row_and_one_with_a_shorter_history() -> None:
    given = case("B04")
    params = SamplingParams(temperature=0, **given["params"])
    vocab_size = len(given["logits"])
    plain = Draw(SamplingParams(temperature=0), 0, 0, 0)
    for output, expected, argmax in [
        ([], given["first_step"]["expect"], given["first_step"]["argmax"]),
        (given["output_ids"], given["expect_logits"], given["argmax"]),
    ]:
        long, short = rules(params, given["prompt_ids"], vocab_size), rules(params, [6], vocab_size)
        assert long is not None
        assert short is not None
        for token_id in output:
            long.push(token_id)
        short.push(5)
        x = torch.tensor([given["logits"]] * 2)
        assert adjust.apply(x, [long, short]) == [None, None]
        torch.testing.assert_close(x[0], torch.tensor(expected), atol=1e-6, rtol=0)
        torch.testing.assert_close(
            x[1], torch.tensor(ruled(given["logits"], params, [6], [5])), atol=1e-6, rtol=0
        )
        batch = [Draw(params, 0, 0, len(output), long), plain, Draw(params, 0, 0, 1, short)]
        assert sample(torch.tensor([given["logits"]] * 3), batch).token_ids == [argmax, 3, 3]


@pytest.mark.parametrize("replayed", [0, 1, 3])
def test_no_end_is_drawn_before_min_tokens_and_any_from_there_on(replayed: int) -> None:
    params = SamplingParams(temperature=0, min_tokens=3)
    made = rules_for(
        params,
        [],
        10,
        end_ids=frozenset({2, 7}),
        bad_words=[],
        matcher=None,
        output_token_ids=[5] * replayed,
    )
    logits = torch.tensor([[0.0, 1.0, 9.0, 0.0, 0.0, 2.0, 0.0, 8.0, 0.0, 0.0]])
    for position in range(replayed, 5):
        (token_id,) = sample(logits, [Draw(params, 0, 0, position, made)]).token_ids
        assert token_id == (5 if position < 3 else 2)
        if made is not None:
            made.push(5)


def test_counts_stay_right_over_a_long_output() -> None:
    """The arrays of the history grow several times meanwhile."""
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.5)
    output = np.random.default_rng(0).integers(0, 300, 1000).tolist()
    made = rules(params, [1, 2, 2, 299], 310)
    assert made is not None
    for token_id in output:
        made.push(token_id)
    logits = torch.randn(310, generator=torch.Generator().manual_seed(0))
    x = logits.clone().unsqueeze(0)
    adjust.apply(x, [made])
    expected = ruled(logits.tolist(), params, [1, 2, 2, 299], output)
    torch.testing.assert_close(x[0], torch.tensor(expected), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_an_extreme_penalty_leaves_the_possible_possible(penalty: float) -> None:
    made = rules(SamplingParams(repetition_penalty=penalty), [0, 1, 2, 3], 5)
    assert made is not None
    x = torch.tensor([[2.0, -2.0, 0.0, -torch.inf, 1.0]])
    adjust.apply(x, [made])
    assert x.isfinite().tolist() == [[True, True, True, False, True]]


def _words(tokenizer: Any, word: str) -> list[tuple[int, ...]]:
    return [tuple(tokenizer.encode(form, add_special_tokens=False)) for form in (word, " " + word)]


def _greedy(logits: torch.Tensor, params: SamplingParams, words: Sequence[tuple[int, ...]], *out: int) -> int:
    made = rules_for(
        params,
        [],
        len(logits),
        end_ids=frozenset(),
        bad_words=words,
        matcher=None,
        output_token_ids=out,
    )
    sampled = sample(logits.unsqueeze(0), [Draw(params, 0, 0, len(out), made)])
    assert sampled.problems == [None]
    return sampled.token_ids[0]


def test_bad_words_of_one_token_are_barred_in_both_forms(smollm2: Any) -> None:
    expected = case("B12")["rows"][0]["expect_first_id"]
    words = _words(smollm2, "Paris")
    (spaced,) = smollm2.encode(" Paris")
    logits = torch.zeros(len(smollm2))
    logits[spaced], logits[expected] = 2.0, 1.0
    assert _greedy(logits, SamplingParams(temperature=0), words) == expected
    assert _greedy(logits, SamplingParams(temperature=0), words, spaced, 5) == expected


def test_bad_words_of_several_tokens_are_barred_only_where_they_would_end(smollm2: Any) -> None:
    words = _words(smollm2, "ZORK")
    assert words == [(74, 25089), (1777, 25089)]
    for best in (74, 1777, 25089):
        logits = torch.zeros(len(smollm2))
        logits[best], logits[9] = 2.0, 1.0
        for output in ([], [5], [25089], [74, 5], [1777, 74, 5]):
            assert _greedy(logits, SamplingParams(temperature=0), words, *output) == best
        for output in ([74], [1777], [5, 1777], [74, 74]):
            expected = 9 if best == 25089 else best
            assert _greedy(logits, SamplingParams(temperature=0), words, *output) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}], ids=str)
def test_a_row_whose_rules_leave_nothing_has_a_problem_and_its_neighbours_none(
    temperature: float, filters: dict[str, Any]
) -> None:
    (allowed,) = case("B12")["rows"][2]["allowed_token_ids"]
    params = SamplingParams(temperature=temperature, allowed_token_ids=[allowed], **filters)
    emptied = rules_for(
        params, [], 8000, end_ids=frozenset(), bad_words=[(allowed,), (3, allowed)], matcher=None
    )
    left = rules_for(params, [], 8000, end_ids=frozenset(), bad_words=[(3, allowed)], matcher=None)
    logits = torch.randn(3, 8000, generator=torch.Generator().manual_seed(6))
    plain = Draw(SamplingParams(temperature=temperature, **filters), 1, 0, 0)
    sampled = sample(logits, [Draw(params, 0, 0, 0, emptied), plain, Draw(params, 0, 0, 0, left)])
    assert sampled.problems == ["no_candidates", None, None]
    assert sampled.token_ids[1:] == [sample(logits[1:2], [plain]).token_ids[0], allowed]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RequestError(ErrorCode.INVALID_REQUEST, "no such rule"), ErrorCode.INVALID_REQUEST, "no such rule"),
        (TypeError("oh"), ErrorCode.ENGINE_ERROR, "TypeError: oh"),
    ],
    ids=["refused", "fault"],
)
def test_a_failing_grammar_is_the_problem_of_its_row_alone(
    error: Exception, code: ErrorCode, said: str
) -> None:
    params = SamplingParams(temperature=0, logprobs=1)
    matchers = [Only({4}), Only({4}, error), Only({5})]
    draws = [
        Draw(params, 0, 0, 0, rules_for(params, [], 100, end_ids=frozenset(), bad_words=[], matcher=matcher))
        for matcher in matchers
    ]
    sampled = sample(torch.randn(3, 100), draws)
    problem = sampled.problems[1]
    assert isinstance(problem, RequestError)
    assert problem.code == code
    assert said in problem.message
    assert sampled.problems[::2] == [None, None]
    assert sampled.token_ids[::2] == [4, 5]
    assert [each is None for each in sampled.logprobs] == [False, True, False]


def test_a_grammar_is_told_what_was_written_and_what_is_pushed() -> None:
    matcher = Only({1})
    made = rules_for(
        SamplingParams(),
        [9],
        10,
        end_ids=frozenset(),
        bad_words=[],
        matcher=matcher,
        output_token_ids=[3, 4],
    )
    assert made is not None
    made.push(5)
    assert matcher.pushed == [3, 4, 5]


def test_a_plain_request_has_no_rules() -> None:
    def of(end_ids: frozenset[int] = frozenset({2}), output: Sequence[int] = (), **params: Any) -> Any:
        return rules_for(
            SamplingParams(**params),
            [1],
            10,
            end_ids=end_ids,
            bad_words=[],
            matcher=None,
            output_token_ids=output,
        )

    assert of() is None
    assert of(temperature=0.3, top_p=0.5, top_k=4, min_p=0.1, logprobs=3) is None
    assert of(min_tokens=1) is not None
    assert of(min_tokens=1, output=[4]) is None
    assert of(min_tokens=1, end_ids=frozenset()) is None
    assert of(min_tokens=1, end_ids=frozenset({10, 2000})) is None  # ids the model cannot write
