"""A row's line in the output: its columns, then the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.bulk.generate import Report, generate
from producer.bulk.interrupt import Interrupt
from producer.bulk.lines import Line, Row, parse
from producer.bulk.records import is_cut, of_result
from producer.bulk.wording import Wording
from protocol import Choice, Result, Usage
from tests.producer.bulk.orders import order, read_rows
from tests.producer.fake_worker import FakeWorker

RESULT = Result(
    id="x",
    state="succeeded",
    choices=[Choice(index=0, text="yes", token_ids=[1], finish_reason="length")],
    usage=Usage(prompt_tokens=2, completion_tokens=1),
    seed=7,
)
ANSWER = {
    "completion": "yes",
    "finish_reason": "length",
    "prompt_tokens": 2,
    "completion_tokens": 1,
    "seed": 7,
}
NAMES = st.sampled_from(["", "a", "é", *ANSWER, "stop_reason", "completions"])
VALUES = st.sampled_from([None, "", "é}", 'q"', 0, 2**70, 0.1, [], {}, [{}], {"a": {"completion": "x"}}])


@settings(max_examples=30)
@given(st.dictionaries(NAMES, VALUES, max_size=4), st.sampled_from([None, 1]))
def test_any_row_keeps_its_columns_beside_the_answer(columns: dict[str, Any], indent: int | None) -> None:
    raw = json.dumps(columns, indent=indent).replace("\n", " ").encode()
    row = parse(Line(1, raw))
    assert isinstance(row, Row)
    record = of_result(row, RESULT)
    kept = {name: value for name, value in columns.items() if name not in ("stop_reason", "completions")}
    assert json.loads(record.payload) == {**kept, **ANSWER}
    assert is_cut(record)


@pytest.mark.parametrize(
    "format", ["jsonl", *(pytest.param(one, marks=pytest.mark.long) for one in ("openai", "parquet"))]
)
def test_rows_without_columns_are_answered_in_every_format(url: str, tmp_path: Path, format: str) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{}\n{ }\n{"a": 1}\n')
    wording = Wording(prompt_template="a haiku")
    with FakeWorker(url):
        report = generate(
            order(source, output, url, wording=wording, defaults={"max_tokens": 2}, format=format),
            Interrupt(),
        )
    assert isinstance(report, Report)
    assert (report.totals.answered, report.totals.cut, report.totals.failed) == (3, 3, {})
    if format == "jsonl":
        answered = [(row.get("a"), row["completion"]) for row in read_rows(output)]
        assert answered == [(a, "a haiku") for a in (None, None, 1)]
