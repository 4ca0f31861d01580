"""What is checked before a prompt enters an engine."""

from __future__ import annotations

import pytest

from engine.requests import build_request, check_model
from protocol import ErrorCode, Job, RequestError, SamplingParams


def job(**fields: object) -> Job:
    return Job.model_validate({"id": "j", "prompt": "x", **fields})


@pytest.mark.parametrize(("length", "room"), [(54, 10), (62, 2), (63, 1)])
def test_an_answer_is_cut_to_what_the_context_holds(length: int, room: int) -> None:
    asked = job(params=SamplingParams(max_tokens=10))
    assert build_request(asked, [5] * length, 512, 64).max_tokens == room
    assert build_request(job(), [5] * length, 512, 64).max_tokens == 64 - length


@pytest.mark.parametrize("length", [64, 65, 5000])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(length: int) -> None:
    with pytest.raises(RequestError, match=rf"{length} tokens.* 64") as refused:
        build_request(job(), [5] * length, 512, 64)
    assert refused.value.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt is empty") as refused:
        build_request(job(), [], 512, 64)
    assert refused.value.code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("prompt", "position"), [([512], 0), ([-1, 5], 0), ([5, 5279552648203111001], 1), ([5, 6, -7], 2)]
)
def test_ids_outside_the_vocabulary_are_named(prompt: list[int], position: int) -> None:
    with pytest.raises(
        RequestError, match=rf"prompt\[{position}\] is {prompt[position]}.* 0 to 511"
    ) as refused:
        build_request(job(), prompt, 512, 64)
    assert refused.value.code == ErrorCode.INVALID_REQUEST


def test_the_whole_vocabulary_is_accepted() -> None:
    made = build_request(job(priority="high"), [0, 511], 512, 64)
    assert (made.prompt_token_ids, made.priority) == ((0, 511), 0)


@pytest.mark.parametrize("prompt", [[1.5], [True, False], ["5"], [[5], "x"], [[5], []]])
def test_what_is_not_a_list_of_ids_is_no_job(prompt: object) -> None:
    with pytest.raises(ValueError, match="prompt"):
        job(prompt=prompt)


def test_a_job_for_another_model_is_refused() -> None:
    check_model(job(), "served")
    check_model(job(model="served"), "served")
    with pytest.raises(RequestError, match="serves served, the job asks for other") as refused:
        check_model(job(model="other"), "served")
    assert refused.value.code == ErrorCode.MODEL_NOT_FOUND
