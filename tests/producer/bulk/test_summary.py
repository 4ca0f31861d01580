"""What is said of a run at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.producer.bulk.orders import write_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program


def test_the_summary_counts_the_rows_that_were_cut(program: Program, url: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a b", "max_tokens": 2},
        {"prompt": "a b", "max_tokens": 3, "n": 2},  # the second choice alone has three words
        {"prompt": "a b", "n": 2, "finish": {"finish_reason": "length"}},
        {"prompt": "a", "finish_reason": "length", "completions": [{"finish_reason": "length"}]},
        {"prompt": "x", "max_tokens": 0},
    ]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with FakeWorker(url):
        done = program("generate", source, "-o", output)
        assert "4 answered (2 cut by max_tokens), 1 failed in" in done.stderr
        assert "  1 x invalid_request, first line 5: " in done.stderr
        assert f"answers: {output}\nerrors:  {tmp_path / 'out.errors.jsonl'}\n" in done.stderr
        write_rows(source, [*rows, {"prompt": "one more"}])
        done = program("generate", source, "-o", output, "--json", "--quiet")
        summary = json.loads(done.stdout)
        assert done.stderr == ""
    assert (summary["answered"], summary["cut_by_max_tokens"], summary["kept"]) == (5, 2, 5)


def test_tokens_are_told_where_some_came_back(program: Program, url: str, tmp_path: Path) -> None:
    good, bad = (
        write_rows(tmp_path / "g.jsonl", [{"prompt": "a b"}]),
        write_rows(tmp_path / "b.jsonl", [{"x": 1}]),
    )
    with FakeWorker(url):
        assert "tokens read, 2 written (" in program("generate", good, "-o", tmp_path / "1.jsonl").stderr
    none = write_rows(tmp_path / "n.jsonl", [])
    for source, summary in [(bad, "0 answered, 1 failed in"), (none, "0 answered, 0 failed in")]:
        told = program("generate", source, "-o", source.with_suffix(".out.jsonl")).stderr
        assert summary in told
        assert "tokens read" not in told
