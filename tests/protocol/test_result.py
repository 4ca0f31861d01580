"""What the worker stores without building a model is what the model says."""

from __future__ import annotations

from typing import Any

import pytest

from protocol import Result, StoredChoice, StoredResult

TOLD = {"token_id": 4, "token": "t", "logprob": -0.5, "rank": 1, "top_logprobs": []}
CHOICES: list[dict[str, Any]] = [
    {
        "index": 0,
        "text": 'a \U0001f389 \u2028 " \0',
        "token_ids": [1, 2],
        "finish_reason": "stop",
        "stop_reason": 7,
    },
    {"index": 1, "text": "", "token_ids": [], "finish_reason": None, "stop_reason": None, "logprobs": None},
    {"index": 2, "text": "b", "token_ids": [4], "logprobs": [TOLD], "prompt_logprobs": [None, TOLD]},
]
FIELDS: dict[str, Any] = {
    "id": "j",
    "state": "succeeded",
    "attempt": 2,
    "model": "m",
    "worker": None,
    "seed": 2**64 - 1,
}


@pytest.mark.parametrize(
    "more",
    [
        {"usage": {"prompt_tokens": 3, "completion_tokens": 3}, "error": None},
        {
            "usage": None,
            "error": {"code": "c", "message": "m"},
            "started_at": 1.5,
            "finished_at": 1_700_000_000.25,
        },
    ],
)
def test_an_encoded_result_reads_as_the_model_that_has_the_fields(more: dict[str, Any]) -> None:
    fields = FIELDS | more
    raw = StoredResult(v=1, **fields, choices=[StoredChoice(**choice) for choice in CHOICES]).encode()
    assert Result.decode(raw) == Result.model_validate({**fields, "choices": CHOICES})
    assert b"null" not in raw.replace(b'"prompt_logprobs":[null', b"")
