"""RQ's own worker: it knows nothing of batches, and yet none is left behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from broker import batches
from producer.batch.slices import Slice
from tests.producer.batch.setup import ROWS, Bench, may_sweep
from tests.producer.bulk.orders import write_rows
from tests.producer.bulk.processes import wait_for
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program

LINE = "rq:queue:millstream-batch-default"


@pytest.fixture
def lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> str:
    """A batch whose next slice is not in line, on a server that may be swept."""
    monkeypatch.setattr(batches, "may_sweep", may_sweep)
    batch_id = bench.submit(write_rows(bench.folder / "in.jsonl", ROWS[:3]))
    bench.rq.delete(LINE)
    return batch_id


@pytest.mark.parametrize("verb", [["status"], ["cancel"], ["fetch", "-o", "out.jsonl"], ["list"]])
def test_whoever_asks_how_a_batch_stands_has_it_taken_up(
    bench: Bench, program: Program, lost: str, verb: list[str]
) -> None:
    name, *options = verb
    program("batch", name, *([] if name == "list" else [lost]), *options)
    program("batch", name, *([] if name == "list" else [lost]), *options)
    client: Any = bench.rq
    assert client.llen(LINE) == 1, "once, in half a minute"
    with FakeWorker(bench.url):
        bench.work()
    assert bench.status(lost) == ("cancelled" if name == "cancel" else "completed")


def test_slices_look_after_the_other_batches(bench: Bench, lost: str) -> None:
    client: Any = bench.queue.client
    old = bench.submit(write_rows(bench.folder / "none.jsonl", []))
    late = bench.submit(write_rows(bench.folder / "late.jsonl", ROWS[:2]))
    client.hset(bench.keys.batch(late), "expires_at", 1)
    with FakeWorker(bench.url):
        bench.work()
        assert [bench.status(one) for one in (lost, old, late)] == ["completed", "completed", "expired"]
        client.hset(bench.keys.batch(old), "completed_at", 1)
        client.delete(bench.keys.batches_swept)
        bench.submit(bench.folder / "none.jsonl")
        bench.work()
    assert batches.show(bench.queue, old) is None


@pytest.mark.long
def test_a_slice_whose_process_was_killed_is_put_in_line_by_rq(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = bench.submit(write_rows(tmp_path / "in.jsonl", ROWS))
    at_work, work = tmp_path / "at-work", Slice.work

    def stays(slice: Slice) -> None:
        if slice.number == 2:
            at_work.touch()
            threading.Event().wait()
        work(slice)

    child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr(Slice, "work", stays)
            bench.work()
        finally:
            os._exit(1)
    client: Any = bench.rq
    started = f"rq:wip:{LINE.removeprefix('rq:queue:')}"
    assert wait_for(at_work.exists, 60)
    assert f"{batch_id}-2" in str(client.zrange(started, 0, -1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for job_id in client.zrange(started, 0, -1):
        client.zadd(started, {job_id: 1})  # an hour later
    with FakeWorker(bench.url):
        bench.work()
    assert bench.status(batch_id) == "completed"
