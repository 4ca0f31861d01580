"""CSV as input; F11."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from producer.bulk.lines import BadRow, Line, Row, parse
from producer.bulk.requests import Requests
from protocol import RequestError
from tests.producer.bulk.orders import read_rows
from tests.producer.bulk.reading import columns_of, rows_of
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program

DATA = Path(__file__).parents[1] / "data"


def test_cells_of_csv_stay_text() -> None:
    with (DATA / "F11.csv").open(newline="", encoding="utf-8-sig") as file:
        expected = list(csv.DictReader(file))
    assert len(expected) == 9
    assert columns_of(DATA / "F11.csv") == expected


def test_rows_that_are_no_csv_are_errors_of_their_own() -> None:
    good, many, few, open_quote = rows_of(DATA / "F11.ragged.csv")
    assert isinstance(good, Line)
    assert json.loads(good.raw) == {"id": "1", "prompt": "ok"}
    found = [(row.line, row.code) for row in (many, few, open_quote) if isinstance(row, BadRow)]
    assert found == [(3, "invalid_csv"), (4, "invalid_csv"), (5, "invalid_csv")]


def test_csv_comes_back_as_it_was(program: Program, url: str, tmp_path: Path) -> None:
    with FakeWorker(url):
        done = program("generate", DATA / "F11.csv", "-o", tmp_path / "out.jsonl")
    assert done.returncode in (0, 3)  # the empty prompt of row 5 may be answered or refused
    expected = {str(row["id"]): row for row in columns_of(DATA / "F11.csv")}
    answers = {row["id"]: row for row in read_rows(tmp_path / "out.jsonl")}
    assert set(expected) - set(answers) <= {"5"}
    for key, row in answers.items():
        assert {name: row[name] for name in expected[key]} == expected[key]
        assert row["completion"] == expected[key]["prompt"]


def test_parameters_in_csv_are_read_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("prompt,max_tokens,stop,temperature\n7,7,1,\n8,many,,0.5\n")
    requests = Requests("run", {"temperature": 0.0}, None)
    good, bad = (parse(row) for row in rows_of(path) if isinstance(row, Line))
    assert isinstance(good, Row)
    assert isinstance(bad, Row)
    job = requests.asked(good).job
    assert (job.prompt, job.params.max_tokens, job.params.stop, job.params.temperature) == (
        "7",
        7,
        ("1",),
        0.0,
    )
    with pytest.raises(RequestError, match="max_tokens"):
        requests.asked(bad)
