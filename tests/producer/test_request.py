"""What a caller gives in Python is what the worker reads, or it is refused here, by field and in one line."""

from __future__ import annotations

import datetime
import math
from contextlib import nullcontext
from typing import Any

import pytest

from producer.nesting import DEEPEST
from producer.request import SUBMIT_AT_ONCE, build_job, check_limits, in_pipelines
from protocol import Job, RequestError, encode_token
from protocol.volume import MOST_LOG_BYTES, MOST_PAYLOAD_BYTES, most_logged

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
        check_limits(job)


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


# -- how large a job may be ------------------------------------------------------------------------------------


def test_a_job_of_the_largest_size_passes_and_one_byte_more_does_not() -> None:
    room = MOST_PAYLOAD_BYTES - len(build(prompt="").encode())
    build(prompt="x" * room)
    with pytest.raises(RequestError, match=r"4,194,305 bytes; the limit is 4,194,304 \(4 MiB\)"):
        build(prompt="x" * (room + 1))


@pytest.mark.parametrize(
    ("asked", "passes"),
    [
        ({"max_tokens": 1_000_000}, True),
        ({"max_tokens": 2_000_000}, False),
        ({"max_tokens": 2_000_000, "stream": False}, True),
        ({"max_tokens": 100_000, "n": 128}, False),
        ({"max_tokens": 2_000, "n": 128, "logprobs": 5}, True),
        ({"max_tokens": 2_000, "n": 128, "logprobs": 20}, False),
        ({"n": 128}, True),  # how many tokens it may have the model alone knows
        ({"max_completion_tokens": 2_000_000}, False),
        ({"max_completion_tokens": 1_000_000}, True),
        ({"max_tokens": 2_000_000, "max_completion_tokens": 10}, True),  # the newer name wins
        ({"max_tokens": 10, "max_completion_tokens": 2_000_000}, False),
    ],
)
def test_a_job_that_may_have_too_much_to_tell_is_refused_with_the_limit(
    asked: dict[str, Any], passes: bool
) -> None:
    stream = asked.pop("stream", True)
    with (
        nullcontext()
        if passes
        else pytest.raises(RequestError, match=r"the limit is 268,435,456 \(256 MiB\)")
    ):
        build(prompt="x", sampling=asked, stream=stream)


def test_every_prompt_counts() -> None:
    tokens = MOST_LOG_BYTES // 200 // 10
    build(prompt=["x"] * 10, sampling={"max_tokens": tokens})
    with pytest.raises(RequestError, match="20 choices"):
        build(prompt=["x"] * 20, sampling={"max_tokens": tokens})


def test_the_reckoning_bounds_what_is_logged() -> None:
    """Of common tokens; a token of many letters or escapes is longer, and rare."""
    job_id = "j" * 32
    event = encode_token(job_id, 123456, 12, 12, " straightforward", [123456])
    logged = most_logged(Job.model_validate({"id": job_id, "prompt": "x", "params": {"max_tokens": 1}}))
    assert logged is not None
    assert 0.8 * logged < len(event) <= logged


def test_what_is_sent_together_is_bounded_by_number_and_bytes() -> None:
    jobs = [build(prompt="x" * size, job_id=f"j{size}") for size in (1, 2, 3, 4_000_000, 4, 300_000, 5)]
    sent = [[job.id for job in batch] for batch in in_pipelines(iter(jobs))]
    assert sent == [["j1", "j2", "j3", "j4000000", "j4"], ["j300000", "j5"]]
    small = [build(prompt="x", job_id=f"j{number}") for number in range(SUBMIT_AT_ONCE + 1)]
    assert [len(batch) for batch in in_pipelines(small)] == [SUBMIT_AT_ONCE, 1]
    assert list(in_pipelines([])) == []
