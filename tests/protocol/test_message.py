"""What is a turn of a chat."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from protocol import Job, Message, describe_validation

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}}


def refusal(messages: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Job.model_validate({"id": "j", "messages": messages})
    return describe_validation(caught.value)


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        ({"role": "user", "content": ""}, ""),
        ({"role": "user", "content": "a\0 b\n"}, "a\0 b\n"),
        (
            {"role": "user", "content": [{"type": "text", "text": half} for half in ("Hi ", "there")]},
            "Hi there",
        ),
        ({"role": "user", "content": []}, ""),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ""),
        ({"role": "assistant", "tool_calls": [CALL]}, ""),
        ({"role": "tool", "tool_call_id": "c1", "content": "4"}, "4"),
        ({"role": "judge", "name": "Ann", "content": "x", "reasoning_content": "y"}, "x"),
    ],
    ids=str,
)
def test_turns_survive_the_queue_with_their_text(turn: dict[str, Any], text: str) -> None:
    job = Job.model_validate({"id": "j", "messages": [turn]})
    payload = job.encode()
    assert Job.decode(payload) == job
    assert Job.decode(payload).encode() == payload
    assert job.messages is not None
    assert job.messages[0].text == text


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        (
            [{"role": "user"}],
            "messages.0: content is missing; only an assistant turn with tool_calls may have none",
        ),
        ([{"role": "user", "content": None, "tool_calls": [CALL]}], "messages.0: content is missing; .*"),
        ([{"role": "assistant", "content": None}], "messages.0: content is missing; .*"),
        ([{"role": "assistant", "tool_calls": []}], "messages.0: content is missing; .*"),
        ([{"role": "user", "content": 5}], "messages.0.content: .*, not 5"),
        ([{"content": "x"}], "messages.0.role is missing"),
        ([{"role": "", "content": "x"}], "messages.0.role: give text that is not empty, not ''"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages.0.content: part 0: unsupported content type 'image_url'; only text can be read",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\.0\.content\.0\.text is missing"),
        ([{"role": "user", "content": ["x"]}], r"messages\.0\.content\.0: .*"),
        ([{"role": "user", "content": "x", "weight": 1}], "messages.0.weight: no such parameter"),
        ("Hi", "messages: .* list, not 'Hi'"),
        ([["user", "Hi"]], "messages.0: .*"),
        ([], "messages: give a list that is not empty"),
    ],
    ids=str,
)
def test_what_is_no_turn_is_one_line(messages: Any, line: str) -> None:
    said = refusal(messages)
    assert re.fullmatch(line, said), said  # a dot is no line break


def test_a_turn_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Message(role="user", content="x").content = "y"  # type: ignore[misc]
