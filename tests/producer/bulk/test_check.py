"""`generate --check`: what there is to do, and nothing is done."""

from __future__ import annotations

import json
from pathlib import Path

from tests.producer.bulk.orders import write_rows
from tests.producer.program import Program


def test_check_estimates_what_there_is_to_do(program: Program, tmp_path: Path) -> None:
    rows = [{"prompt": "word " * 400, "max_tokens": 50}, {"prompt": [1, 2, 3], "max_tokens": 5, "n": 2}, {}]
    done = program("generate", write_rows(tmp_path / "in.jsonl", rows), "--check", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (
        3,
        {"rows": 3, "bad": 1, "prompt_tokens": 503, "most_output_tokens": 60, "input_incomplete": []},
    )
