"""The verbs of batches, given what cannot be: one line says what is wrong, with the right exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.producer.batch.setup import ROWS, Bench
from tests.producer.bulk.orders import write_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program


@pytest.fixture
def ended(bench: Bench) -> str:
    """A batch that is completed."""
    batch_id = bench.submit(write_rows(bench.folder / "in.jsonl", ROWS[:2]))
    with FakeWorker(bench.url):
        bench.work()
    return batch_id


def folder_missing(folder: Path) -> Path:
    return folder / "no" / "out.jsonl"


def a_folder(folder: Path) -> Path:
    (folder / "out").mkdir()
    return folder / "out"


def behind_a_file(folder: Path) -> Path:
    return folder / "in.jsonl" / "out.jsonl"


def name_too_long(folder: Path) -> Path:
    return folder / ("x" * 300)


def other_ending(folder: Path) -> Path:
    return folder / "out.parquet"


def loop(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


def errors_are_a_folder(folder: Path) -> Path:
    (folder / "out.errors.jsonl").mkdir()
    return folder / "out.jsonl"


PLACES = [folder_missing, a_folder, behind_a_file, name_too_long, other_ending, loop, errors_are_a_folder]


@pytest.mark.long
def test_places_that_cannot_be_fetched_to(program: Program, ended: str, tmp_path: Path) -> None:
    for made in PLACES:
        folder = tmp_path / made.__name__
        folder.mkdir()
        write_rows(folder / "in.jsonl", [])
        place = made(folder)
        before = sorted(folder.rglob("*"))
        for more in ([], ["--overwrite"]):
            done = program("batch", "fetch", ended, "-o", place, *more)
            assert done.returncode in (1, 2), (made, done)
            assert done.stderr.count("\n") == 1, (made, done.stderr)
            assert str(folder) in done.stderr, (made, done.stderr)
        assert sorted(folder.rglob("*")) == before, made


def test_what_fetch_finds_changed_is_said_so(
    bench: Bench, program: Program, ended: str, tmp_path: Path
) -> None:
    own = Path(bench.show(ended).output)
    done = program("batch", "fetch", ended, "-o", own)
    assert done.returncode == 0, "its own place: nothing is to do"
    own.unlink()
    done = program("batch", "fetch", ended, "-o", tmp_path / "out.jsonl")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert str(own) in done.stderr


def test_a_folder_that_is_no_batch_is_told_apart_from_one_that_is_elsewhere(
    program: Program, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    for name, why in {"other": "is not the folder of a batch", "elsewhere": "is not on this machine"}.items():
        done = program("batch", "resume", tmp_path / name)
        assert (done.returncode, f"{tmp_path / name} {why}" in done.stderr) == (1, True), done.stderr


def test_a_batch_whose_folder_is_lost_says_so_and_holds_nothing_up(
    bench: Bench, program: Program, tmp_path: Path
) -> None:
    lost = bench.submit(write_rows(tmp_path / "in.jsonl", ROWS[:2]))
    folder = bench.path(lost)
    folder.delete()
    other = bench.submit(tmp_path / "in.jsonl")
    with FakeWorker(bench.url):
        bench.work()
    assert bench.status(other) == "completed"
    shown = program("batch", "status", lost)
    assert shown.returncode == 0
    assert f"{folder.path} is not on this machine" in shown.stderr


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--dir", "in.jsonl"], "in.jsonl"),
        (["--dir", "/proc/none"], "/proc/none"),
        (["--completion-window", "0h"], "--completion-window"),
        (["--retention", "-1d"], "--retention"),
        (["--completion-window", "999999999d"], "--completion-window"),
        (["--queue", "a b"], "queue"),
        (["--window", "0"], "window"),
        (["--format", "xml"], "--format"),
        (["--webhook", "http://[::1"], "--webhook"),
        (["--rq-url", "http://x"], "http://x"),
        (["--prompt-template", "{{"], "template"),
    ],
)
def test_what_submit_cannot_do_is_refused(
    bench: Bench, program: Program, monkeypatch: pytest.MonkeyPatch, given: list[str], says: str
) -> None:
    monkeypatch.chdir(bench.folder)
    write_rows(bench.folder / "in.jsonl", ROWS[:1])
    done = program("batch", "submit", "in.jsonl", *given)
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stderr
    assert says in done.stderr
    assert not list(bench.folder.glob("batches/*"))
    assert "no batches" in program("batch", "list").stderr


@pytest.mark.long
def test_the_same_input_twice_is_two_batches(bench: Bench, program: Program, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ROWS[:2])
    ids = [program("batch", "submit", source).stdout.strip() for _ in range(2)]
    assert ids[0] != ids[1]
    source.unlink()  # copies are read
    with FakeWorker(bench.url) as worker:
        bench.work()
    assert [bench.status(batch_id) for batch_id in ids] == ["completed", "completed"]
    assert len(worker.answered) == len(set(worker.answered)) == 4
