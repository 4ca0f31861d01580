"""A server that loses everything: the folder has the batch, and `batch resume` goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker import batches
from broker.connection import connect
from broker.queue import Queue
from producer.batch import asking, finalising, slices, submitting, validating
from tests.producer.batch.setup import ROWS, Bench
from tests.producer.bulk.orders import write_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program
from tests.proxy import Proxy


@pytest.mark.parametrize(
    "slices_before",
    [0, pytest.param(2, marks=pytest.mark.long), 15, pytest.param(35, marks=pytest.mark.long), 1000],
)
def test_wherever_the_server_loses_everything_the_batch_is_gone_on_with(
    bench: Bench, program: Program, monkeypatch: pytest.MonkeyPatch, slices_before: int
) -> None:
    for owner, name in [
        (slices, "LONGEST_S"),
        (validating, "PIECE_S"),
        (finalising, "PIECE_S"),
        (asking, "NOTE_EVERY_S"),
    ]:
        monkeypatch.setattr(owner, name, 0.0)
    batch_id = bench.submit(write_rows(bench.folder / "in.jsonl", [*ROWS[:12], {"prompt": 3}]))
    with FakeWorker(bench.url):
        bench.go(batch_id, slices_before)
        folder = bench.path(batch_id).path
        client: Any = bench.queue.client
        client.flushall()
    shown = program("batch", "status", batch_id)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert f"`millstream batch resume {folder}`" in shown.stderr
    assert f"`millstream batch resume {folder}`" in program("batch", "list").stderr
    resumed = program("batch", "resume", folder)
    assert (resumed.returncode, resumed.stdout.strip()) == (0, batch_id), resumed.stderr
    again = program("batch", "resume", folder)
    assert (again.returncode, batch_id in again.stderr) == (2, True)
    assert "resume" not in program("batch", "list").stderr
    with FakeWorker(bench.url) as worker:
        bench.go(batch_id)
    assert len(worker.answered) == (0 if slices_before == 1000 else len(set(worker.answered)))
    assert bench.status(batch_id) == "completed"
    answers, errors = bench.files(batch_id)
    assert [row["completion"] for row in answers] == [row["prompt"] for row in ROWS[:12]]
    assert len(errors) == 1


def test_a_slice_at_work_stops_where_the_batch_is_gone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "NOTE_EVERY_S", 0.0)
    batch_id = bench.submit(write_rows(bench.folder / "in.jsonl", ROWS[:3]))
    bench.slice()
    folder = bench.path(batch_id)
    client: Any = bench.queue.client
    note = slices.Slice._note

    def note_then_flush(*args: Any, **kwargs: Any) -> Any:
        done = note(*args, **kwargs)
        client.flushall()
        return done

    monkeypatch.setattr(slices.Slice, "_note", note_then_flush)
    slices.Slice(bench.queue, bench.chain, batch_id, 2).work()
    assert client.exists(bench.keys.batch(batch_id)) == 0
    assert folder.path.exists()


@pytest.mark.parametrize("verb", ["submit", "resume"])
def test_a_submission_whose_reply_is_lost_is_heard_the_second_time(bench: Bench, verb: str) -> None:
    """Its batch is registered: it is put in line, and nobody is told that it was refused."""
    source = write_rows(bench.folder / "in.jsonl", ROWS[:3])
    known = bench.submit(source)  # the server knows the script
    if verb == "resume":
        folder = bench.path(known).path
        batches.forget(bench.queue, known)
    with Proxy(Path(bench.url.removeprefix("unix://"))) as proxy:
        behind, bench.queue = bench.queue, Queue(connect(proxy.url), bench.keys)
        proxy.lose_reply_to(b"retention_s")
        batch_id = (
            bench.submit(source) if verb == "submit" else submitting.resume(folder, bench.queue, bench.chain)
        )
        bench.queue.close()
        bench.queue = behind
    assert proxy.lost == 1
    assert (batch_id == known) == (verb == "resume")
    with FakeWorker(bench.url):
        bench.work()
    assert bench.status(batch_id) == "completed"


def other_queue(folder: Path) -> list[object]:
    return [folder, "--queue", "other"]


def no_batch(folder: Path) -> list[object]:
    return [folder.parent]


def a_file(folder: Path) -> list[object]:
    return [folder / "order.json"]


def damaged(folder: Path) -> list[object]:
    (folder / "order.json").write_text("{}")
    return [folder]


def without_manifest(folder: Path) -> list[object]:
    (folder / "output.jsonl.run" / "manifest.json").unlink()
    return [folder]


@pytest.mark.parametrize("given", [other_queue, no_batch, a_file, damaged, without_manifest])
def test_what_is_no_folder_of_a_batch_is_said_so(
    bench: Bench, program: Program, given: Callable[[Path], list[object]]
) -> None:
    batch_id = bench.submit(write_rows(bench.folder / "in.jsonl", ROWS[:1]))
    folder = bench.path(batch_id).path
    bench.queue.client.flushall()
    done = program("batch", "resume", *given(folder))
    assert done.returncode in (1, 2)
    assert done.stderr.count("\n") == 1
    assert str(folder.parent) in done.stderr
