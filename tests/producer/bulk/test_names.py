"""Names of rows: missing ones, and those that are not unique; F04."""

from __future__ import annotations

from pathlib import Path

from tests.producer.bulk.orders import read_rows, write_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program

DATA = Path(__file__).parents[1] / "data"


def test_names_that_are_not_unique_refuse_a_batch_file(program: Program, url: str, tmp_path: Path) -> None:
    with FakeWorker(url) as worker:
        refused = program("generate", DATA / "F04.jsonl", "-o", tmp_path / "out.jsonl")
        assert refused.returncode == 2
        assert "line 3: custom_id is that of line 1 too" in refused.stderr
        for line, kind in [(4, "empty"), (6, "missing"), (7, "no text"), (8, "null")]:
            assert f"line {line}: custom_id is {kind}" in refused.stderr
        assert not (tmp_path / "out.jsonl").exists()
        assert worker.answered == []


def test_names_that_are_not_unique_are_errors_where_asked(program: Program, url: str, tmp_path: Path) -> None:
    with FakeWorker(url) as worker:
        done = program("generate", DATA / "F04.jsonl", "-o", tmp_path / "out.jsonl", "--bad-ids", "rows")
    assert done.returncode == 3
    answers, errors = read_rows(tmp_path / "out.jsonl"), read_rows(tmp_path / "out.errors.jsonl")
    assert [row["custom_id"] for row in answers] == ["u1", "u2", "x" * 600, "u1 ", "a/../b"]
    assert answers[0]["completion"] == "first"
    assert [(row["line"], row["error"]["code"]) for row in errors] == [
        (n, "invalid_id") for n in (3, 4, 6, 7, 8)
    ]
    assert len(worker.answered) == 5


def test_a_column_of_names_holds_for_any_rows(program: Program, url: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a", "key": "1"}, {"prompt": "b", "key": "1"}])
    with FakeWorker(url):
        refused = program("generate", source, "-o", tmp_path / "out.jsonl", "--id-column", "key")
        assert (refused.returncode, "line 2: key is that of line 1 too" in refused.stderr) == (2, True)
        assert program("generate", source, "-o", tmp_path / "out.jsonl").returncode == 0
