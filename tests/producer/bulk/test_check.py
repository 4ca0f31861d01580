"""`generate --check`: what there is to do, and nothing is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.producer.bulk.orders import write_rows
from tests.producer.program import Program

BAD = {"prompt": 3.5}
ONE = {"prompt": "a", "max_tokens": 10}
SEVERAL = [
    {"prompt": ["a", "b"], "max_tokens": 10},
    {"prompt": ["a", "b"], "n": 3, "max_completion_tokens": 5},
]
ENDLESS = {"prompt": "a"}


def test_check_estimates_what_there_is_to_do(program: Program, tmp_path: Path) -> None:
    rows = [{"prompt": "word " * 400, "max_tokens": 50}, {"prompt": [1, 2, 3], "max_tokens": 5, "n": 2}, {}]
    done = program("generate", write_rows(tmp_path / "in.jsonl", rows), "--check", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (
        3,
        {
            "rows": 3,
            "bad": 1,
            "prompt_tokens": 503,
            "most_output_tokens": 60,
            "rows_without_limit": 0,
            "input_incomplete": [],
        },
    )


@pytest.mark.parametrize(
    ("rows", "most", "endless", "words"),
    [
        ([ONE, BAD], 10, 0, "to read, at most 10 to write"),
        ([ONE, *SEVERAL], 60, 0, "to read, at most 60 to write"),
        (
            [ONE, ENDLESS, BAD],
            10,
            1,
            "to read, at most 10 to write by the rows that have max_tokens (1 have none)",
        ),
        ([ENDLESS, ENDLESS, BAD], 0, 2, "to read; no row has max_tokens"),
        ([BAD], 0, 0, "to read, at most 0 to write"),
    ],
)
def test_what_rows_may_write_is_counted_by_prompt_and_choice(
    program: Program, tmp_path: Path, rows: list[dict[str, Any]], most: int, endless: int, words: str
) -> None:
    command = ("generate", write_rows(tmp_path / "in.jsonl", rows), "--check")
    assert program(*command).stderr.splitlines()[-1].endswith(words)
    told = json.loads(program(*command, "--json").stdout)
    assert (told["most_output_tokens"], told["rows_without_limit"]) == (most, endless)
