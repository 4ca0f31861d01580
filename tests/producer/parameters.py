"""For every sampling parameter a value that it takes, and values that it does not."""

from __future__ import annotations

from typing import Any

NAN = float("nan")

GOOD: dict[str, Any] = {
    "max_tokens": 20,
    "max_completion_tokens": 30,
    "min_tokens": 2,
    "n": 3,
    "allowed_token_ids": [3, 4],
    "bad_words": ["Paris", "two words"],
    "logit_bias": {"42": -100, "7": 1.5},
    "repetition_penalty": 1.5,
    "frequency_penalty": -0.5,
    "presence_penalty": 0.25,
    "temperature": 0.5,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "seed": 0,
    "stop": ["\n\n", "END"],
    "stop_token_ids": [5, 6],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "logprobs": True,
    "top_logprobs": 4,
    "prompt_logprobs": 2,
    "truncate_prompt_tokens": 100,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
}
"""None is the default, and together they are one valid request."""

_NO_COUNT: list[Any] = [0, -1, 3.0, "16", True, [1], 2**70 + 0.5]
_NO_IDS: list[Any] = [5, "5", [-1], [2**31], ["5"], [True], [[1]], {"5": 1}]
_NO_TEXTS: list[Any] = [5, "", [""], [5], {"a": 1}, [["x"]]]
_NO_SWITCH: list[Any] = [1, 0, "true", [True]]
_NO_LOGPROBS: list[Any] = [-1, 21, 1.0, "2", [2]]
_NO_PENALTY: list[Any] = [-2.01, 2.01, "0", True, NAN]

BAD: dict[str, list[Any]] = {
    "max_tokens": _NO_COUNT,
    "max_completion_tokens": _NO_COUNT,
    "min_tokens": [-1, 1.0, "0", True],
    "n": [*_NO_COUNT, 129],
    "allowed_token_ids": [*_NO_IDS, []],
    "bad_words": _NO_TEXTS,
    "logit_bias": [
        {"a": 1},
        {"-1": 1},
        {"5": 101},
        {"5": -100.5},
        {"5": "1"},
        {"5": True},
        [5],
        5,
        {"5": NAN},
    ],
    "repetition_penalty": [0, -1, "1", True, NAN],
    "frequency_penalty": _NO_PENALTY,
    "presence_penalty": _NO_PENALTY,
    "temperature": [-0.1, "0", True, NAN, float("inf")],
    "top_k": [-2, 1.0, "5", True],
    "top_p": [-0.1, 1.01, "1", True, NAN],
    "min_p": [-0.1, 1.01, "1", True, NAN],
    "seed": [-1, 2**64, 1.0, "1", True],
    "stop": _NO_TEXTS,
    "stop_token_ids": _NO_IDS,
    "include_stop_str_in_output": _NO_SWITCH,
    "ignore_eos": _NO_SWITCH,
    "skip_special_tokens": _NO_SWITCH,
    "logprobs": _NO_LOGPROBS,
    "top_logprobs": [*_NO_LOGPROBS, True, 5],  # 5: it goes with logprobs: true
    "prompt_logprobs": [*_NO_LOGPROBS, True],
    "truncate_prompt_tokens": _NO_COUNT,
    "response_format": [
        "json_object",
        {},
        {"type": "json"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": "x"}},
        {"type": "regex", "regex": ""},
        {"type": "regex", "regex": "a", "strict": True},
        {"type": "choice", "choice": []},
        {"type": "choice", "choice": "yes"},
        {"type": "grammar", "grammar": None},
    ],
}
