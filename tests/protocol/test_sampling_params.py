"""What each sampling parameter takes and refuses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from protocol import Job, SamplingParams, describe_validation

NAN, INF = float("nan"), float("inf")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

TAKEN: dict[str, list[Any]] = {
    "max_tokens": [1, 100_000, 10**30],
    "max_completion_tokens": [1, 7],
    "min_tokens": [0, 5],
    "n": [1, 128],
    "allowed_token_ids": [[0], [2**31 - 1, 5], (7,)],
    "bad_words": [[], ["a", "b c"], "alone"],
    "logit_bias": [{}, {"5": -100, "0": 100}, {5: 1, 2**31 - 1: 0.5}],
    "repetition_penalty": [0.01, 1, 1.3, 10],
    "frequency_penalty": [-2, 0, 2.0],
    "presence_penalty": [-2.0, 0, 2],
    "temperature": [0, 0.7, 1, 100],
    "top_k": [-1, 0, 1, 10**9],
    "top_p": [0, 1e-9, 0.95, 1],
    "min_p": [0, 0.05, 1],
    "seed": [0, 1, 2**64 - 1],
    "stop": [[], ["a"], ["###", "\n"], "bare"],
    "stop_token_ids": [[], [0, 2], (5,)],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "logprobs": [0, 1, 20, True, False],
    "top_logprobs": [],  # goes with another field: below
    "prompt_logprobs": [0, 20],
    "truncate_prompt_tokens": [1, 10**9],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        {
            "type": "json_schema",
            "json_schema": {"name": "x", "description": "y", "schema": True, "strict": False},
        },
        {"type": "regex", "regex": "[0-9]{4}"},
        {"type": "choice", "choice": ["yes", "no"]},
        {"type": "grammar", "grammar": 'root ::= "a"'},
    ],
}

NUMBERS = ["5", True, [5], {}]
REFUSED: dict[str, list[tuple[Any, str]]] = {
    "max_tokens": [
        (0, "1"),
        (-1, "1"),
        (3.0, "whole number"),
        *((value, "whole number") for value in NUMBERS),
    ],
    "max_completion_tokens": [(0, "1"), ("16", "whole number")],
    "min_tokens": [(-1, "0"), (1.5, "whole number")],
    "n": [(0, "1"), (129, "128"), (True, "whole number")],
    "allowed_token_ids": [
        ([], "not empty"),
        ([-1], "0"),
        ([2**31], "2147483648"),
        (["5"], "whole number"),
        (5, "list"),
    ],
    "bad_words": [([""], "not empty"), ("", "not empty"), ([5], "text"), (5, "list")],
    "logit_bias": [
        ({"5": 101}, "100"),
        ({"5": -100.5}, "-100"),
        ({"-1": 1}, "whole number"),
        ({-1: 1}, "0"),
        ({"a": 1}, "whole number"),
        ({"5": "1"}, "number"),
        ({"5": NAN}, "finite"),
        ({"5": None}, "number"),
        ({2**31: 1}, "2147483648"),
        ([5], "object"),
    ],
    "repetition_penalty": [(0, "0"), (-1, "0"), (INF, "finite"), ("1", "number")],
    "frequency_penalty": [(2.1, "2"), (-2.1, "-2"), (NAN, "finite")],
    "presence_penalty": [(2.1, "2"), (-2.1, "-2"), (True, "number")],
    "temperature": [(-1, "0"), (NAN, "finite"), (INF, "finite"), ("hot", "number")],
    "top_k": [(-2, "-1"), (1.5, "whole number"), (True, "whole number")],
    "top_p": [(1.01, "1"), (-0.1, "0"), ("0.9x", "number"), (NAN, "finite")],
    "min_p": [(1.5, "1"), (-0.1, "0")],
    "seed": [(-1, "0"), (2**64, str(2**64)), (0.5, "whole number"), ("1", "whole number")],
    "stop": [("", "not empty"), ([""], "not empty"), ([5], "text"), (5, "list"), ([None], "text")],
    "stop_token_ids": [
        ([-1], "0"),
        ([2**31], "2147483648"),
        ([1.5], "whole number"),
        ([True], "whole number"),
        (5, "list"),
    ],
    "include_stop_str_in_output": [(1, "true or false"), ("yes", "true or false")],
    "ignore_eos": [(0, "true or false"), ("true", "true or false")],
    "skip_special_tokens": [(1, "true or false")],
    "logprobs": [(-1, "0"), (21, "20"), (1.0, "whole number"), ("5", "whole number")],
    "top_logprobs": [(21, "20"), (-1, "0"), (True, "whole number")],
    "prompt_logprobs": [(21, "20"), (-1, "0"), (True, "whole number")],
    "truncate_prompt_tokens": [(0, "1"), (-1, "1"), (1.0, "whole number")],
    "response_format": [
        ({"type": "xml"}, "'text', 'json_object', 'json_schema', 'regex', 'choice', 'grammar'"),
        ({}, "type is missing"),
        ("json_object", "object"),
        ({"type": "json_schema"}, "json_schema is missing"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "json_schema.schema is missing"),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, "an object, or true or false, not 'x'"),
        ({"type": "regex", "regex": ""}, "regex: give text that is not empty"),
        ({"type": "regex", "regex": "a", "flags": "i"}, "flags: no such parameter"),
        ({"type": "choice", "choice": []}, "choice: give a list that is not empty"),
        ({"type": "choice", "choice": ["a", 1]}, "choice.1: give text"),
        ({"type": "choice", "choice": "ab"}, "choice: .*list"),
        ({"type": "grammar"}, "grammar is missing"),
        ({"type": "text", "json_schema": {}}, "json_schema: no such parameter"),
    ],
}


def decoded(params: SamplingParams) -> tuple[bytes, SamplingParams]:
    """The payload a job with these parameters has, and what a worker reads out of it."""
    payload = Job(id="j", prompt="x", params=params).encode()
    return payload, Job.decode(payload).params


def pairs(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}={value}"[:60])
        for name, values in table.items()
        for value in values
    ]


def test_every_parameter_is_here() -> None:
    assert set(TAKEN) == set(REFUSED) == set(SamplingParams.model_fields)


@pytest.mark.parametrize(("name", "value"), pairs(TAKEN))
def test_what_is_in_range_is_taken_and_survives_the_queue(name: str, value: Any) -> None:
    params = SamplingParams.model_validate({name: value})
    payload, back = decoded(params)
    assert back == params
    assert decoded(back)[0] == payload, "the same job must have the same digest, however often it is written"


@pytest.mark.parametrize(("name", "fault"), pairs(REFUSED))
def test_what_is_out_of_range_is_one_line_with_field_value_and_range(
    name: str, fault: tuple[Any, str]
) -> None:
    value, said = fault
    with pytest.raises(ValidationError) as caught:
        SamplingParams.model_validate({name: value})
    line = describe_validation(caught.value)
    assert re.fullmatch(rf"{name}[^\n;]*{said}[^\n;]*", line), line
    if not isinstance(value, list | dict):
        assert line.endswith(f", not {value!r}")


@pytest.mark.parametrize("name", SamplingParams.model_fields)
def test_none_is_the_default(name: str) -> None:
    assert SamplingParams.model_validate({name: None}) == SamplingParams()
    assert decoded(SamplingParams.model_validate({name: None}))[0] == b'{"id":"j","prompt":"x"}'


def test_what_is_no_parameter_is_refused_by_name() -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams.model_validate({"max_new_tokens": 5, "temprature": None, "top_p": 2})
    assert describe_validation(caught.value) == (
        "top_p: give at most 1, not 2; max_new_tokens: no such parameter"
    )


def test_parameters_fit_together() -> None:
    SamplingParams(min_tokens=5, max_tokens=5)
    SamplingParams(min_tokens=50)
    for limit in ({"max_tokens": 4}, {"max_completion_tokens": 4, "max_tokens": 9}):
        with pytest.raises(ValidationError, match="min_tokens is 5, more than the 4"):
            SamplingParams.model_validate({"min_tokens": 5, **limit})
    for logprobs in (None, False, 3):
        with pytest.raises(ValidationError, match="top_logprobs goes with logprobs: true"):
            SamplingParams(logprobs=logprobs, top_logprobs=3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": 0}, 0),
        ({"logprobs": 5}, 5),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 7}, 7),
    ],
    ids=str,
)
def test_how_many_alternatives_are_told(given: dict[str, Any], told: int | None) -> None:
    params = SamplingParams.model_validate(given)
    assert params.num_logprobs == told
    assert decoded(params)[1].num_logprobs == told


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 7, "max_tokens": 20}, 7),
        ({"max_completion_tokens": 20, "max_tokens": 7}, 20),
    ],
    ids=str,
)
def test_the_newer_name_of_the_limit_wins(given: dict[str, Any], limit: int | None) -> None:
    assert SamplingParams.model_validate(given).token_limit == limit


@pytest.mark.parametrize(
    ("stop", "read"),
    [(None, ()), ([], ()), ("es", ("es",)), (["###"], ("###",)), (["a", "b"], ("a", "b"))],
    ids=str,
)
def test_forms_of_stop(stop: Any, read: tuple[str, ...]) -> None:
    params = SamplingParams.model_validate({"stop": stop})
    assert params.stop == read
    assert decoded(params)[1].stop == read


def test_a_bias_has_numbers_for_keys_however_it_came() -> None:
    written = SamplingParams.model_validate({"logit_bias": {"7": 1, 5: -2.5}})
    assert written.logit_bias == {7: 1.0, 5: -2.5}
    payload, back = decoded(written)
    assert b'"logit_bias":{"7":1.0,"5":-2.5}' in payload
    assert back.logit_bias == written.logit_bias


def test_a_schema_survives_the_queue_under_openais_name() -> None:
    payload, back = decoded(SamplingParams.model_validate({"response_format": TAKEN["response_format"][2]}))
    assert json.loads(payload)["params"]["response_format"] == TAKEN["response_format"][2]
    assert back.response_format is not None
    assert back.response_format.type == "json_schema"
    assert back.response_format.json_schema.schema_ == SCHEMA


def test_what_is_frozen_holds_nothing_that_changes() -> None:
    params = SamplingParams(stop=("a",), stop_token_ids=(1,))
    with pytest.raises(ValidationError):
        params.n = 2  # type: ignore[misc]
    assert isinstance(params.stop, tuple)
    assert isinstance(params.stop_token_ids, tuple)
