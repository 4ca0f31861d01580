"""What is a job, and how it is written down."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from protocol import Job, describe_validation
from protocol.job import CHAT_ONLY
from protocol.validation import MAX_FAULTS

TURNS = [{"role": "user", "content": "Hi"}]


def refusal(**fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Job.model_validate({"id": "j", **fields})
    line = describe_validation(caught.value)
    assert "\n" not in line
    return line


def written(**fields: Any) -> bytes:
    """The payload; reading it back and writing it again must not change a byte, for digests are made of it."""
    job = Job.model_validate({"id": "j", **fields})
    payload = job.encode()
    assert Job.decode(payload) == job
    assert Job.decode(payload).encode() == payload
    return payload


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", [""]),
        ("Hi\0", ["Hi\0"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([511], [[511]]),
        ([-1, 5], [[-1, 5]]),  # what the vocabulary holds only the worker knows
        ([5279552648203111001], [[5279552648203111001]]),
        (["5"], ["5"]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["Hi", "there"], ["Hi", "there"]),
    ],
    ids=str,
)
def test_prompts_of_each_kind(prompt: Any, prompts: list[Any]) -> None:
    job = Job.decode(written(prompt=prompt, params={"n": 3}))
    assert job.prompts == prompts
    assert job.num_choices == 3 * len(prompts)


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ([], "prompt: give a list that is not empty"),
        ([1.5], "prompt.0: give a whole number, not 1.5"),
        ([True, False], "prompt.0: give a whole number, not True; prompt.1: .*not False"),
        ([5, "x"], "prompt.1: give a whole number, not 'x'"),
        ([[5], "x"], "prompt.1: give a list, not 'x'"),
        ([[5], []], "prompt.1: give a list that is not empty"),
        ([[5], [6, 1.5]], "prompt.1.1: give a whole number, not 1.5"),
        (["x", 5], "prompt.1: give text, not 5"),
        (5, "prompt: give text or a list of token ids, or a list of either, not 5"),
        (None, "give exactly one of prompt and messages"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_said_in_one_line(prompt: Any, line: str) -> None:
    assert re.fullmatch(line, refusal(prompt=prompt))


def test_a_thousand_faults_are_not_all_told() -> None:
    line = refusal(prompt=[True] * 1000)
    assert line.count("prompt.") == MAX_FAULTS
    assert line.endswith(f"; and {1000 - MAX_FAULTS} more")


def test_a_long_value_is_cut() -> None:
    assert len(refusal(prompt="x", priority="y" * 10_000)) < 200


def test_exactly_one_input() -> None:
    assert refusal() == refusal(prompt="x", messages=TURNS) == "give exactly one of prompt and messages"


def test_fields_of_a_chat_go_with_messages() -> None:
    given = {
        "tools": [{"type": "function"}],
        "chat_template": "x",
        "chat_template_kwargs": {"thinking": False},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert set(given) == CHAT_ONLY
    written(messages=TURNS, **given)
    for name, value in given.items():
        assert refusal(prompt="x", **{name: value}) in (
            f"{name} go with messages",
            f"{name} goes with messages",
        )
    assert refusal(prompt="x", chat_template="x") == "chat_template goes with messages"
    assert refusal(prompt="x", chat_template="x", tools=[{}]) == "chat_template and tools go with messages"
    defaults = {name: Job.model_fields[name].default for name in CHAT_ONLY}
    assert written(prompt="x", **defaults) == written(prompt="x")
    assert refusal(messages=TURNS, add_generation_prompt=True, continue_final_message=True) == (
        "give one of add_generation_prompt and continue_final_message"
    )
    assert "chat_template_kwargs: messages, tools cannot" in refusal(
        messages=TURNS, chat_template_kwargs={"tools": [], "messages": [], "thinking": True}
    )


def test_choices_have_a_bound() -> None:
    written(prompt=["x"] * 8, params={"n": 128})
    assert refusal(prompt=["x"] * 9, params={"n": 128}) == (
        "1152 choices asked for (prompts times n), at most 1024"
    )


def test_faults_deep_inside_are_named_as_the_user_wrote_them() -> None:
    assert refusal(prompt="x", params={"top_p": "0.9x"}) == "params.top_p: give a number, not '0.9x'"
    faulty = {"response_format": {"type": "json_schema", "json_schema": {}}}
    assert refusal(prompt="x", params=faulty) == "params.response_format.json_schema.schema is missing"
    assert refusal(prompt="x", params={"logprobs": 21}).startswith("params.logprobs: ")
    assert refusal(prompt="x", promt="y") == "promt: no such parameter"


def test_equal_jobs_have_equal_payloads() -> None:
    plain = b'{"id":"j","prompt":"x"}'
    same = {"temperature": 1, "stop": None, "stop_token_ids": [], "logit_bias": {}, "top_p": 1.0}
    assert written(prompt="x", params=same, priority="normal", tools=None) == plain
    assert Job.digest(plain) == Job.digest(written(prompt="x"))
    assert Job.digest(plain) != Job.digest(written(prompt="x", split_special_tokens=True))
    one = written(prompt="x", params={"stop": "a", "logit_bias": {"5": 1}, "temperature": 0})
    assert one == written(prompt="x", params={"stop": ["a"], "logit_bias": {5: 1.0}, "temperature": 0.0})


def test_a_seed_is_the_one_given_or_one_of_the_ids_own() -> None:
    def seed(name: str, given: int | None = None) -> int:
        return Job.model_validate({"id": name, "prompt": "x", "params": {"seed": given}}).seed

    assert seed("a", 0) == seed("b", 0) == 0
    assert seed("a") == seed("a")
    assert len({seed(str(index)) for index in range(100)}) == 100
    assert all(0 <= seed(str(index)) < 2**64 for index in range(100))


@pytest.mark.parametrize(
    "flag",
    [
        "add_special_tokens",
        "split_special_tokens",
        "continue_final_message",
        "add_generation_prompt",
        "stream",
    ],
)
@pytest.mark.parametrize("value", ["no", "yes", "true", 0, 1, 1.0])
def test_a_flag_is_true_or_false(flag: str, value: Any) -> None:
    with pytest.raises(ValidationError) as raised:
        Job.model_validate({"id": "j", "messages": [{"role": "user", "content": "x"}], flag: value})
    assert describe_validation(raised.value) == f"{flag}: give true or false, not {value!r}"


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"tenant": "a b"}, "tenant: give 1 to 100 letters, digits, '.', '_', '@' and '-', not 'a b'"),
        ({"priority": "urgent"}, "priority: give 'high', 'normal' or 'low', not 'urgent'"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: give an object, not a list"),
        ({"result_ttl_s": "x"}, "result_ttl_s: give a number, not 'x'"),
        ({"result_ttl_s": -1}, "result_ttl_s: give 0 or more, not -1"),
        ({"model": 5}, "model: give text, not 5"),
        ({"params": 5}, "params: give an object, not 5"),
        ({"params": {"response_format": {}}}, "params.response_format.type is missing"),
    ],
    ids=str,
)
def test_each_kind_of_fault_is_told_in_plain_words(fields: dict[str, Any], line: str) -> None:
    assert refusal(prompt="x", **fields) == line


def test_times_are_written_as_given_and_left_out_where_not() -> None:
    assert written(prompt="p") == b'{"id":"j","prompt":"p"}'
    assert b'"delay_s":1.5,"deadline_in_s":3.0,"max_retries":0' in written(
        prompt="p", delay_s=1.5, deadline_in_s=3, max_retries=0
    )


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ({"not_before": 1, "delay_s": 1}, "give one of not_before and delay_s"),
        ({"deadline": 1, "deadline_in_s": 1}, "give one of deadline and deadline_in_s"),
        ({"not_before": 10, "deadline": 10}, "only after its deadline"),
        ({"delay_s": 10, "deadline_in_s": 9}, "only after its deadline"),
        ({"delay_s": -1}, "delay_s"),
        ({"deadline": float("inf")}, "deadline"),
        ({"not_before": float("nan")}, "not_before"),
        ({"max_retries": -1}, "max_retries"),
        ({"max_retries": True}, "max_retries"),
    ],
)
def test_times_that_say_two_things_or_none_are_refused(times: dict[str, Any], why: str) -> None:
    assert why in refusal(prompt="p", **times)
