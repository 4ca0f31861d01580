"""Batches whose process died, whose place is taken, whose end is to be told, and whose time is over."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from broker import batches
from producer.batch import slices, webhook, worker
from producer.batch.outcomes import opened
from producer.bulk.records import Record
from producer.refusal import Refused
from tests.producer.batch.setup import ROWS, Bench
from tests.producer.bulk.orders import write_rows
from tests.producer.fake_worker import FakeWorker


@pytest.mark.long
def test_a_chain_that_broke_anywhere_is_taken_up_by_a_sweep(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", ROWS))
    put = bench.chain.put
    lost: list[int] = []
    monkeypatch.setattr(slices.Chain, "put", lambda _, __, number: lost.append(number))
    with FakeWorker(bench.url):
        while not bench.show(batch_id).has_ended:
            bench.work()
            with monkeypatch.context() as patch:
                patch.setattr(slices.Chain, "put", lambda _, *slice: put(*slice))
                bench.sweep()
    assert lost == [2, 4]
    assert bench.status(batch_id) == "completed"


def test_a_sweep_leaves_what_is_in_line_or_at_work(bench: Bench, tmp_path: Path) -> None:
    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", ROWS))
    bench.sweep()
    assert bench.show(batch_id).slice == 1
    with bench.path(batch_id).locked() as mine:
        assert mine
        client: Any = bench.rq
        client.delete("rq:queue:millstream-batch-default")
        bench.sweep()
        assert bench.show(batch_id).slice == 1
    bench.sweep()
    assert bench.show(batch_id).slice == 2


def test_a_slice_that_was_replaced_changes_nothing(bench: Bench, tmp_path: Path) -> None:
    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", ROWS))
    assert bench.queue.run(batches.advance(bench.keys, batch_id, 1, "new", "*", None)) == "validating"
    assert bench.queue.run(batches.advance(bench.keys, batch_id, 1, "new", "*", None)) == "validating", (
        "again"
    )
    assert bench.queue.run(batches.advance(bench.keys, batch_id, 1, "old", "*", "completed")) is None
    assert bench.queue.run(batches.note(bench.keys, batch_id, 1, (7, 7))) is None
    bench.work()
    assert bench.status(batch_id) == "validating"
    assert bench.show(batch_id).completed == 0


def test_records_that_were_written_and_not_counted_are_counted_once(bench: Bench, tmp_path: Path) -> None:
    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", ROWS))
    bench.slice()
    folder = bench.path(batch_id)
    with opened(folder) as (outcomes, rows):
        before = folder.outcomes.read_bytes()
        done = [Record(rows[number].number, rows[number].digest, True, b"{}") for number in (3, 5)]
        outcomes.append([done[0]])
    folder.outcomes.write_bytes(before)  # killed between the two
    with folder.places().spool.open("ab") as spool:
        spool.write(b"7 0123456789abcdef + {")
    with opened(folder) as (outcomes, rows):
        outcomes.append(done)
        assert outcomes.answered == 2
        assert [number for number in range(8) if outcomes.is_done(number)] == [3, 5]
        assert rows.number(rows[59].number) == 59
    assert folder.places().spool.read_bytes().count(b"\n") == 2


@pytest.mark.long
def test_a_fault_is_shown_until_the_batch_goes_on(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", ROWS))
    bench.slice()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with FakeWorker(bench.url):
        with monkeypatch.context() as patch:
            patch.setattr("producer.batch.outcomes._write", full)
            bench.work()
        assert "No space left on device" in bench.show(batch_id).note
        bench.sweep()
        bench.work()
    assert bench.status(batch_id) == "completed"
    assert bench.show(batch_id).note == ""


@pytest.mark.parametrize(
    "at", ["run_rows", *(pytest.param(at, marks=pytest.mark.long) for at in ("validate", "finalise"))]
)
def test_what_nobody_expected_is_told_and_tried_again(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("what\nelse")

    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", ROWS[:3]))
    with FakeWorker(bench.url):
        with monkeypatch.context() as patch:
            patch.setattr(slices, at, fail)
            bench.work()
            assert bench.show(batch_id).note == "KeyError: 'what\\nelse' (more in the batch worker's log)"
            assert not bench.show(batch_id).has_ended
            assert bench.rq.keys("rq:job:*") == [], "RQ does not try by itself"
        bench.sweep()
        bench.work()
    assert bench.status(batch_id) == "completed"
    assert bench.show(batch_id).note == ""


def test_a_sweeper_outlives_what_nobody_expected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    swept = threading.Semaphore(0)

    def fail(*_: object) -> None:
        swept.release()
        raise KeyError("else")

    monkeypatch.setattr(worker, "sweep", fail)
    monkeypatch.setattr(worker, "SWEEP_EVERY_S", 0.001)
    sweeper = worker.Sweeper(bench.queue, bench.chain)
    sweeper.start()
    try:
        assert all(swept.acquire(timeout=10) for _ in range(3))
    finally:
        sweeper.stop()
    assert "KeyError: 'else'" in caplog.text


class Listener(http.server.BaseHTTPRequestHandler):
    """Refuses the first, and takes the rest."""

    heard: list[tuple[str, dict[str, Any]]]
    first: int

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.heard.append((self.headers["webhook-id"], body))
        self.send_response(self.first if len(self.heard) == 1 else 204)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def do_GET(self) -> None:
        self.heard.append(("", {}))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def listening(first: int) -> Iterator[str]:
    Listener.heard, Listener.first = [], first
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook"
        server.shutdown()


@pytest.mark.parametrize(
    "first", [503, *(pytest.param(code, marks=pytest.mark.long) for code in (301, 302, 303, 307, 404))]
)
def test_the_webhook_is_told_again_until_it_listens(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(webhook, "FIRST_WAIT_S", 0)
    with listening(first) as url:
        batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", []), webhook=url)
        bench.work()
        assert bench.show(batch_id).webhook == "due"
        assert f"it answered {first}" in bench.show(batch_id).note
        bench.sweep()
        bench.work()
    assert bench.show(batch_id).webhook == "delivered"
    assert [name for name, _ in Listener.heard] == [f"{batch_id}.completed"] * 2
    assert Listener.heard[0][1]["status"] == "completed"


@pytest.mark.long
def test_the_webhook_is_given_up_after_some_tries(bench: Bench, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(webhook, "FIRST_WAIT_S", 0)
    monkeypatch.setattr(webhook, "MOST_TRIES", 2)
    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", []), webhook="http://127.0.0.1:1/")
    for _ in range(4):
        bench.work()
        bench.sweep()
    assert bench.show(batch_id).webhook == "given up"
    assert "it cannot be reached" in bench.show(batch_id).note


@pytest.mark.parametrize(
    "hook",
    [
        *("file:///etc/passwd", "http://", "hook", "http://u:p@host/", "http://h:x/", "http://h:0/"),
        *(
            "http://h/grüße",
            "http://grüße.example/",
            "http://h/?q=ü",
            "http://h/a b",
            "http://h/a\n",
            "http://h/\x7f",
        ),
        *("http://a..b/", f"http://{'a' * 64}.example/"),
    ],
)
def test_a_webhook_is_a_plain_url(bench: Bench, tmp_path: Path, hook: str) -> None:
    with pytest.raises(Refused, match="--webhook"):
        bench.submit(write_rows(tmp_path / "in.jsonl", []), webhook=hook)
    batch = bench.show(bench.submit(tmp_path / "in.jsonl"))
    if hook.startswith("http://h/"):  # as one that an earlier version took
        assert "it cannot be reached" in str(webhook.post(hook.replace("//h/", "//127.0.0.1:1/"), batch))


def test_past_its_retention_nothing_of_a_batch_is_left(bench: Bench, tmp_path: Path) -> None:
    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", ROWS[:2]))
    with FakeWorker(bench.url):
        bench.work()
    bench.sweep()
    folder = bench.path(batch_id)
    client: Any = bench.queue.client
    client.hset(bench.keys.batch(batch_id), "completed_at", 1)
    bench.sweep()
    assert not folder.path.exists()
    assert client.exists(bench.keys.batch(batch_id), bench.keys.batches) == 0
