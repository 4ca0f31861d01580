"""The states of a batch: each is reached, its counts add up, its files are those of `generate`."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from broker import batches
from producer.batch import asking
from producer.batch.api_object import api_object
from producer.bulk.generate import generate
from producer.bulk.inputs import find_inputs
from producer.bulk.interrupt import Interrupt
from protocol import Job
from tests.producer.batch.setup import ROWS, Bench
from tests.producer.bulk.orders import order, run, write_rows
from tests.producer.fake_worker import FakeWorker, echo


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


def test_an_input_that_no_run_could_read_fails_the_batch(bench: Bench, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"custom_id": "a", "body": {"prompt": "x"}}] * 2)
    batch_id = bench.submit(source)
    bench.work()
    assert bench.status(batch_id) == "failed"
    (error,) = bench.show(batch_id).errors
    assert "line 2: custom_id is that of line 1 too" in error["message"]


def test_no_rows_at_all_are_completed(bench: Bench, tmp_path: Path) -> None:
    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", []))
    bench.work()
    assert bench.status(batch_id) == "completed"
    assert bench.files(batch_id) == ([], [])


@pytest.mark.long
def test_cancelled_on_the_way_it_keeps_what_is_answered(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", ROWS), window=5)
    bench.slice()
    monkeypatch.setattr(asking, "NOTE_EVERY_S", 0.0)

    def cancel_at_ten(job: Job) -> str:
        if job.prompt == "prompt 10":
            assert bench.queue.run(batches.cancel(bench.keys, batch_id)) == "cancelling"
        return echo(job)

    with FakeWorker(bench.url, answer=cancel_at_ten):
        bench.slice()
        assert bench.status(batch_id) == "cancelling"
        bench.work()
    assert bench.status(batch_id) == "cancelled"
    answers, errors = bench.files(batch_id)
    assert 0 < len(answers) < 60
    assert len(answers) + len(errors) == 60
    assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
    assert bench.queue.run(batches.cancel(bench.keys, batch_id)) == "cancelled"


def test_cancelled_before_it_was_read_it_has_an_error_for_each_row(bench: Bench, tmp_path: Path) -> None:
    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", ROWS))
    bench.queue.run(batches.cancel(bench.keys, batch_id))
    bench.work()
    assert bench.status(batch_id) == "cancelled"
    assert bench.show(batch_id).failed == bench.show(batch_id).total == 60


def test_past_its_window_it_expires_with_what_is_done(bench: Bench, tmp_path: Path) -> None:
    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", ROWS))
    bench.slice()
    client: Any = bench.queue.client
    client.hset(bench.keys.batch(batch_id), "expires_at", 1)
    bench.work()
    assert bench.status(batch_id) == "expired"
    answers, errors = bench.files(batch_id)
    assert answers == []
    assert {error["error"]["code"] for error in errors} == {"batch_expired"}


@pytest.mark.long
def test_any_input_gives_what_generate_gives(bench: Bench, tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.jsonl", ROWS[:3])
    second = tmp_path / "b.csv.gz"
    second.write_bytes(gzip.compress(b"id,prompt,max_tokens\n1,one,4\n2,,\n3,three,\n"))
    batch_id = bench.submit(first, second)
    with FakeWorker(bench.url):
        bench.work()
        generate(
            order(first, tmp_path / "out.jsonl", bench.url, inputs=find_inputs([str(first), str(second)])),
            Interrupt(),
        )
    assert bench.status(batch_id) == "completed"
    batch = bench.show(batch_id)
    assert Path(batch.output).read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    assert Path(batch.error_file).read_bytes() == (tmp_path / "out.errors.jsonl").read_bytes()


@pytest.mark.long
def test_openai_s_types_read_a_batch_in_every_state(bench: Bench, tmp_path: Path) -> None:
    from openai.types import Batch  # takes 0.7 s, in every process that collects tests

    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", ROWS))
    seen = []
    with FakeWorker(bench.url):
        while True:
            read = Batch.model_validate(api_object(bench.show(batch_id)), strict=True)
            seen.append(read.status)
            if read.status == "completed":
                break
            bench.slice()
    assert seen == ["validating", "in_progress", "finalizing", "completed"]
    assert read.request_counts is not None
    assert (read.request_counts.total, read.output_file_id) == (60, bench.show(batch_id).output)
    assert read.error_file_id is None
