"""CSV as input; F11."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from producer.bulk.intake import ask
from producer.bulk.lines import BadRow, Line, Row, parse
from producer.bulk.requests import Requests
from producer.bulk.wording import Wording
from protocol import Job, RequestError
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
    job = requests.row_job(good).job
    assert (job.prompt, job.params.max_tokens, job.params.stop, job.params.temperature) == (
        "7",
        7,
        ("1",),
        0.0,
    )
    with pytest.raises(RequestError, match="max_tokens"):
        requests.row_job(bad)


def jobs_of(path: Path, table: str) -> list[Job | BadRow]:
    """What a table in which every row can be read asks."""
    path.write_text(table)
    requests = Requests("run", {}, None)
    found = [ask(line, requests) for line in rows_of(path)]
    return [one if isinstance(one, BadRow) else one.job for one in found]


def test_what_says_how_text_becomes_tokens_is_read_as_parameters_are(tmp_path: Path) -> None:
    table = io.StringIO()
    rows = [
        ("prompt", "add_special_tokens", "tools", "chat_template", "chat_template_kwargs"),
        ("a", "false", "", "", ""),
        ("b", "", "", "", ""),
        ("c", "no", "", "", ""),
    ]
    csv.writer(table).writerows(rows)
    unlike, like, bad = jobs_of(tmp_path / "in.csv", table.getvalue())
    assert isinstance(unlike, Job)
    assert isinstance(like, Job)
    assert isinstance(bad, BadRow)
    assert (unlike.add_special_tokens, like.add_special_tokens) == (False, True)
    assert bad.message.startswith("add_special_tokens")


def test_a_chat_in_a_table_has_tools_and_a_template_that_is_text(tmp_path: Path) -> None:
    function = {"type": "function", "function": {"name": "f"}}
    rows = [
        {"q": "hi", "tools": json.dumps([function]), "chat_template": "1", "chat_template_kwargs": '{"x": 1}'}
    ]
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    (tmp_path / "in.csv").write_text(table.getvalue())
    requests = Requests("run", {}, None, wording=Wording(prompt_column="q", chat=True))
    (line,) = rows_of(tmp_path / "in.csv")
    found = ask(line, requests)
    assert not isinstance(found, BadRow)
    assert found.job.tools == [function]
    assert found.job.chat_template == "1"
    assert found.job.chat_template_kwargs == {"x": 1}


@pytest.mark.parametrize("depth", [50, 150, 900, 5000, 200_000])
@pytest.mark.parametrize("closed", [True, False])
def test_however_deep_a_cell_is_nested_it_costs_its_row_alone(
    tmp_path: Path, depth: int, closed: bool
) -> None:
    cell = "[" * depth + "]" * depth * closed
    nested, plain = jobs_of(tmp_path / "in.csv", f"prompt,logit_bias\na,{cell}\nb,\n")
    assert isinstance(nested, BadRow)
    assert "logit_bias" in nested.message
    assert isinstance(plain, Job)
    (text,) = jobs_of(tmp_path / "in.csv", f"prompt,stop\na,{'[' * 5000}\n")
    assert isinstance(text, Job)
    assert text.params.stop == ("[" * 5000,)
