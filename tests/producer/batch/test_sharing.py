"""Batch workers that share their time between batches, and that are told to stop."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from broker import batches
from producer.batch import asking, slices
from producer.batch.slices import Slice
from tests.producer.batch.setup import ROWS, Bench
from tests.producer.batch.test_killed import fork
from tests.producer.bulk.orders import write_rows
from tests.producer.bulk.processes import ended, wait_for
from tests.producer.bulk.test_interrupted import slowly
from tests.producer.fake_worker import FakeWorker


@pytest.mark.long
def test_batches_take_turns(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SHORTEST_S", 0.0)
    monkeypatch.setattr(asking, "NOTE_EVERY_S", 0.0)
    source = write_rows(tmp_path / "in.jsonl", ROWS)
    turns: list[str] = []
    work = Slice.work

    def note_turn(self: Slice) -> None:
        turns.append(self.batch_id)
        work(self)

    monkeypatch.setattr(Slice, "work", note_turn)
    ids = [bench.submit(source, window=7) for _ in range(2)]
    with FakeWorker(bench.url):
        bench.work()
    assert [bench.status(batch_id) for batch_id in ids] == ["completed", "completed"]
    both = turns[: 2 * min(map(turns.count, ids))]
    assert len(both) > 10
    assert all(one != after for one, after in pairwise(both)), "one after the other"


@pytest.mark.long
def test_a_worker_that_is_told_to_stop_leaves_the_rest_in_line(bench: Bench, tmp_path: Path) -> None:
    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", ROWS * 20), window=20)
    with FakeWorker(bench.url, answer=slowly) as answers:
        child = fork(bench.url)
        assert wait_for(lambda: bench.show(batch_id).completed > 0, 20)
        os.kill(child, signal.SIGTERM)
        assert ended(child, 20) is not None
        batch = bench.show(batch_id)
        assert (batch.status, batch.completed < 1200) == ("in_progress", True)
        assert bench.chain.has(batch_id, batch.slice), "no sweep is needed"
        bench.work()
    assert bench.status(batch_id) == "completed"
    assert len(answers.answered) == len(set(answers.answered)) == 1200


@pytest.mark.long
@pytest.mark.parametrize("ending", ["completed", "cancelled"])
def test_openai_s_types_read_batch_and_lines(bench: Bench, tmp_path: Path, ending: str) -> None:
    from openai.types import Batch
    from openai.types.chat import ChatCompletion

    from producer.batch.api_object import api_object

    body = {"messages": [{"role": "user", "content": "hello"}]}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    source = write_rows(
        tmp_path / "in.jsonl", [{"custom_id": "a", **line}, {"custom_id": "b", **line, "body": {}}]
    )
    batch_id = bench.submit(source, format="openai")
    if ending == "cancelled":
        bench.queue.run(batches.cancel(bench.keys, batch_id))
    with FakeWorker(bench.url):
        bench.work()
    read = Batch.model_validate(api_object(bench.show(batch_id)), strict=True)
    assert (read.status, read.endpoint) == (ending, "/v1/chat/completions")
    assert read.output_file_id is not None
    assert read.error_file_id is not None
    answers, errors = bench.files(batch_id)
    assert (read.output_file_id, read.error_file_id) == (
        bench.show(batch_id).output,
        bench.show(batch_id).error_file,
    )
    for answer in answers:
        content = (
            ChatCompletion.model_validate_json(json.dumps(answer["response"]["body"]))
            .choices[0]
            .message.content
        )
        assert (answer["custom_id"], content, answer["error"]) == ("a", "hello", None)
    codes = {error["custom_id"]: error["error"]["code"] for error in errors}
    expected = {"b": "invalid_request"}
    assert codes == (expected if ending == "completed" else {"a": "batch_cancelled", **expected})
