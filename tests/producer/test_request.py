"""What a caller gives in Python is what the worker reads, or it is refused here, by field and in one line."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest

from producer.nesting import DEEPEST
from producer.request import build_job, check_size
from protocol import Job, RequestError

MESSAGES = [{"role": "user", "content": "x"}]


def nested(levels: int) -> Any:
    value: Any = "x"
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def in_itself() -> Any:
    value: dict[str, Any] = {}
    value["a"] = [value]
    return value


NO_JSON = {
    "NaN": math.nan,
    "infinity": -math.inf,
    "a set": {1, 2},
    "bytes": b"\xff",
    "a date": datetime.date(2024, 1, 1),
    "an object": object(),
    "half a character": "a\ud800",
    "half a character in a key": {"\ud800": 1},
    "itself": in_itself(),
    "deep": nested(DEEPEST + 1),
    "deeper than JSON's writer goes": nested(5000),
}
"""Each was once changed silently, refused for another reason, or refused by the worker alone."""
FIELDS = {
    "tools": lambda value: {"messages": MESSAGES, "tools": [{"a": value}]},
    "chat_template_kwargs": lambda value: {"messages": MESSAGES, "chat_template_kwargs": {"a": value}},
    "messages": lambda value: {"messages": [{"role": "assistant", "tool_calls": [{"a": value}]}]},
    "response_format": lambda value: {
        "prompt": "x",
        "sampling": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": value}}}},
    },
}


def build(**given: Any) -> Job:
    return build_job(
        **{"prompt": None, "messages": None, "params": None, "sampling": {}, "job_id": "j", **given}
    )


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("what", NO_JSON)
def test_what_json_cannot_carry_is_refused_by_its_field(what: str, field: str) -> None:
    with pytest.raises(RequestError) as raised:
        build(**FIELDS[field](NO_JSON[what]))
    assert raised.value.message.startswith(field)
    assert "\n" not in raised.value.message


def test_so_it_is_in_a_job_that_comes_whole() -> None:
    job = Job.model_validate({"id": "j", "messages": MESSAGES, "tools": [{"a": math.nan}]})
    with pytest.raises(RequestError, match="tools: "):
        check_size(job)


@pytest.mark.parametrize("field", FIELDS)
def test_what_json_can_carry_arrives_as_it_was(field: str) -> None:
    for value in (nested(90), [1, -0.5, 1e300, 10**30, None, True, "\u00e9\U0001f389\0"]):
        job = build(**FIELDS[field](value))
        assert Job.decode(job.encode()) == job


@pytest.mark.parametrize("key", ["05", "+5", " 5", "\u0665", "5_0", "-0", "", "9" * 5000])
def test_a_token_id_is_written_in_one_way(key: str) -> None:
    """`{"5": 1, "05": -1}` would be one bias, whichever came last."""
    with pytest.raises(RequestError, match="logit_bias"):
        build(prompt="x", sampling={"logit_bias": {"5": 1, key: -1}})
    assert build(prompt="x", sampling={"logit_bias": {"0": 1, "50": -1}}).params.logit_bias == {0: 1, 50: -1}


def test_a_stray_field_of_a_format_is_told_by_its_place() -> None:
    with pytest.raises(RequestError, match=r"^response_format\.schema: no such parameter$"):
        build(prompt="x", sampling={"response_format": {"type": "json_object", "schema": {}}})
