"""Bulk calls in one process."""

from __future__ import annotations

import pytest

from engine.bulk import generate
from protocol import Job, MillstreamError, SamplingParams
from tests.engine.doubles import (
    PagedDouble,
    assert_empty,
    hashed,
    make_engine,
    request,
    tiny,
    tiny_references,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_bulk_calls_return_their_own_results_in_order() -> None:
    engine = make_engine(PagedDouble(tiny()), max_num_seqs=3)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for call in [[0, 5, 3, 1], [2, 4, 6], [], [0]]:
        results = engine.generate([tiny_references()[i]["prompt_ids"] for i in call], params)
        assert [result.choices[0].token_ids for result in results] == [
            tiny_references()[i]["greedy_40"][:12] for i in call
        ]
        assert all(result.state == "succeeded" for result in results)
    assert_empty(engine)


def test_a_bad_prompt_fails_alone_in_a_bulk_call() -> None:
    engine = make_engine(PagedDouble(hashed, max_model_len=64))
    results = engine.generate([[5, 6], [], [512], [5] * 64, [7]], SamplingParams(temperature=0, max_tokens=3))
    assert [result.state for result in results] == ["succeeded", "failed", "failed", "failed", "succeeded"]
    codes = [result.error.code for result in results if result.error]
    assert codes == ["invalid_request", "invalid_request", "context_length_exceeded"]
    assert [result.usage.completion_tokens for result in results if result.usage] == [3, 0, 0, 0, 3]


def test_a_bulk_call_refuses_an_engine_at_work_and_ids_given_twice() -> None:
    engine = make_engine(PagedDouble(hashed))
    job = Job(id="a", prompt=[5])
    with pytest.raises(MillstreamError, match="same id"):
        engine.generate([job, job])
    engine.add(request("r", [5]))
    with pytest.raises(MillstreamError, match="put it in a list"):
        engine.generate("a text")
    with pytest.raises(MillstreamError, match="idle"):
        engine.generate([[5]])
    engine.abort("r")


def test_what_is_no_prompt_is_told_in_plain_words() -> None:
    engine = make_engine(PagedDouble(hashed))
    results = engine.generate([5, [], [[]], [5, "x"]])  # type: ignore[list-item]
    assert [result.error.message for result in results if result.error] == [
        "prompt: give text or a list of token ids, or a list of either, not 5",
        "prompt: give a list that is not empty",
        "prompt.0: give a list that is not empty",
        "prompt.1: give a whole number, not 'x'",
    ]
    with pytest.raises(MillstreamError, match="a list of prompts, not int"):
        engine.generate(5)  # type: ignore[arg-type]


def test_an_interrupted_bulk_call_leaves_nothing_behind() -> None:
    runner = PagedDouble(hashed)
    engine = make_engine(runner)

    def interrupt() -> None:
        if len(runner.steps) == 3:
            raise KeyboardInterrupt

    runner.before_forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        generate(engine, [[5], [6]], SamplingParams(max_tokens=50, ignore_eos=True))
    assert_empty(engine)
