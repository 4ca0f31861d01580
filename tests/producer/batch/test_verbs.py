"""`millstream batch` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.producer.batch.setup import ROWS, Bench
from tests.producer.bulk.orders import read_rows, write_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program


def test_submit_status_fetch(bench: Bench, program: Program, tmp_path: Path) -> None:
    from openai.types import Batch  # takes 0.7 s, in every process that collects tests

    source = write_rows(tmp_path / "in.jsonl", [*ROWS[:5], {"prompt": 3}])
    submitted = program("batch", "submit", source, "--dir", tmp_path / "batches", "--max-tokens", "4")
    assert submitted.returncode == 0, submitted.stderr
    batch_id = submitted.stdout.strip()
    output = tmp_path / "out.jsonl"
    early = program("batch", "fetch", batch_id, "-o", output)
    assert early.returncode == 5
    assert not output.exists()
    with FakeWorker(bench.url):
        worked = program("batch-worker", "--burst")
    assert worked.returncode == 0, worked.stderr
    shown = program("batch", "status", batch_id, "--json")
    assert Batch.model_validate_json(shown.stdout).status == "completed"
    for _ in range(2):
        done = program("batch", "fetch", batch_id, "-o", output)
        assert done.returncode == 3, done.stderr
        assert "5 completed and 1 failed of 6" in done.stderr
    assert [row["completion"] for row in read_rows(output)] == [f"prompt {number}" for number in range(5)]
    assert len(read_rows(tmp_path / "out.errors.jsonl")) == 1
    output.write_text("mine\n")
    assert "--overwrite" in program("batch", "fetch", batch_id, "-o", output).stderr
    assert output.read_text() == "mine\n"
    assert program("batch", "fetch", batch_id, "-o", output, "--overwrite").returncode == 3
    late = program("batch", "cancel", batch_id)
    assert (late.returncode, "too late" in late.stderr) == (1, True)


def test_list_has_the_newest_first(bench: Bench, program: Program, tmp_path: Path) -> None:
    assert "no batches" in program("batch", "list").stderr
    source = write_rows(tmp_path / "in.jsonl", ROWS[:1])
    ids = [bench.submit(source) for _ in range(3)]
    program("batch", "cancel", ids[1])
    lines = program("batch", "list", "--json").stdout.splitlines()
    assert [json.loads(line)["id"] for line in lines] == ids[::-1]
    assert [json.loads(line)["status"] for line in lines] == ["validating", "cancelling", "validating"]


@pytest.mark.parametrize("verb", ["status", "fetch", "cancel"])
def test_an_unknown_id_is_said_so(program: Program, verb: str) -> None:
    done = program("batch", verb, "batch_0", *(["-o", "x.jsonl"] if verb == "fetch" else []))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "batch_0" in done.stderr


def test_what_cannot_be_is_refused_before_anything_is_kept(program: Program, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ROWS[:1])
    for wrong in (["--completion-window", "soon"], ["--temperature", "-1"], ["--webhook", "ftp://x"]):
        done = program("batch", "submit", source, "--dir", tmp_path / "batches", *wrong)
        assert done.returncode == 2, wrong
        assert wrong[0] in done.stderr or "temperature" in done.stderr
    assert not list((tmp_path / "batches").glob("*"))
