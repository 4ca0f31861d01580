"""An output that no manifest tells about: which rows of the input it answers."""

from __future__ import annotations

from pathlib import Path

from tests.producer.bulk.orders import read_rows, write_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program


def test_a_foreign_output_is_refused_resumed_or_overwritten(
    program: Program, url: str, tmp_path: Path
) -> None:
    rows = [{"custom_id": f"k{number}", "prompt": f"p{number}"} for number in range(6)]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    theirs = [{**rows[4], "completion": "theirs"}, {**rows[0], "prompt": "other", "completion": "stale"}]
    write_rows(output, theirs)
    with output.open("a") as file:
        file.write('{"custom_id": "k1", "prompt": "p1", "compl')
    before, stamp = output.read_bytes(), output.stat().st_mtime_ns
    with FakeWorker(url) as worker:
        refused = program("generate", source, "-o", output)
        assert (refused.returncode, "--resume" in refused.stderr) == (2, True)
        assert (output.read_bytes(), output.stat().st_mtime_ns) == (before, stamp)

        assert program("generate", source, "-o", output, "--resume").returncode == 0
        assert [row["completion"] for row in read_rows(output)] == ["p0", "p1", "p2", "p3", "theirs", "p5"]
        assert len(worker.answered) == 5

        write_rows(output, [{"custom_id": "unknown", "completion": "x"}])
        lost = program("generate", source, "-o", output, "--resume")
        assert (lost.returncode, "answer no row" in lost.stderr) == (2, True)
        assert program("generate", source, "-o", output, "--overwrite").returncode == 0
        assert [row["completion"] for row in read_rows(output)] == [f"p{number}" for number in range(6)]


def test_rows_without_an_id_resume_by_their_columns(program: Program, url: str, tmp_path: Path) -> None:
    rows = [{"prompt": "same"}, {"prompt": "same"}, {"prompt": "else", "max_tokens": 3}]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    write_rows(output, [{**rows[2], "completion": "kept", "seed": 4}, {**rows[0], "completion": "kept too"}])
    with FakeWorker(url):
        assert program("generate", source, "-o", output, "--resume").returncode == 0
    assert [row["completion"] for row in read_rows(output)] == ["kept too", "same", "kept"]
