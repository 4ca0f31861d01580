"""The states of a batch: each is reached, its counts add up, its files are those of `generate`."""

from __future__ import annotations

from pathlib import Path

from tests.producer.batch.setup import ROWS, Bench
from tests.producer.bulk.orders import run, write_rows
from tests.producer.fake_worker import FakeWorker


def test_from_validating_to_completed_with_the_files_of_generate(bench: Bench, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [*ROWS, {"custom_id": "bad", "prompt": 3}])
    batch_id = bench.submit(source)
    seen = [bench.status(batch_id)]
    with FakeWorker(bench.url):
        while bench.status(batch_id) != "completed":
            bench.slice()
            seen.append(bench.status(batch_id))
        run(source, tmp_path / "out.jsonl", bench.url)
    assert seen == ["validating", "in_progress", "finalizing", "completed"]
    batch = bench.show(batch_id)
    assert (batch.total, batch.completed, batch.failed, batch.endpoint) == (61, 60, 1, "/v1/completions")
    assert Path(batch.output).read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    assert Path(batch.error_file).read_bytes() == (tmp_path / "out.errors.jsonl").read_bytes()
    assert not bench.path(batch_id).rows.exists()
