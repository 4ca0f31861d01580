"""Rows that were edited, added or taken out between two runs of the same command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from producer.bulk import generate as bulk
from producer.bulk.generate import generate
from producer.bulk.interrupt import Interrupt
from producer.reach import Server
from protocol import Job, MillstreamError
from tests.producer.bulk.orders import order, read_rows, write_rows
from tests.producer.fake_worker import Failure, FakeWorker, echo

Rows = list[dict[str, Any]]


class InThreads:
    """Stands in for a worker of the run's own: no process, and no model to load."""

    started = 0

    def __init__(self, *told: Any) -> None:
        model, _, queue, url, _ = told
        self._worker = FakeWorker(url, queue, fail_bad, model=model)
        self._runs = False

    def start(self) -> None:
        assert not self._runs
        type(self).started += 1
        self._runs = True
        self._worker.__enter__()

    def check(self, **_: bool) -> bool:
        return False

    def stop(self) -> None:
        if self._runs:
            self._worker.__exit__()


def fail_bad(job: Job) -> str:
    if job.prompt == "bad":
        raise Failure("never")
    return echo(job)


@pytest.fixture
def own_worker(url: str, monkeypatch: pytest.MonkeyPatch) -> type[InThreads]:
    """Runs take the test's server for an embedded one, and bring such a worker."""

    class Embedded(Server):
        embedded = True  # type: ignore[assignment]

    monkeypatch.setattr(bulk, "Server", lambda _: Embedded(url))
    monkeypatch.setattr(bulk, "OwnWorker", InThreads)
    monkeypatch.setattr(InThreads, "started", 0)
    return InThreads


FIRST: Rows = [{"prompt": "a"}, {"prompt": "bad"}, {"prompt": "c"}, {"prompt": 4}]


def edited(rows: Rows) -> Rows:
    return [rows[0], {"prompt": "mended"}, *rows[2:3], {"prompt": "mended too"}]


def removed_and_added(rows: Rows) -> Rows:
    return [*rows[:1], *rows[2:], {"prompt": "new"}]


def fewer(_: Rows) -> Rows:
    return [{"prompt": "another"}]


def added(rows: Rows) -> Rows:
    return [*rows, {"prompt": "new"}]


@pytest.mark.parametrize(
    ("change", "finished"),
    [
        (edited, True),
        (removed_and_added, False),
        pytest.param(edited, False, marks=pytest.mark.long),
        pytest.param(removed_and_added, True, marks=pytest.mark.long),
        *(
            pytest.param(one, is_over, marks=pytest.mark.long)
            for one in (fewer, added)
            for is_over in (True, False)
        ),
    ],
)
@pytest.mark.timeout(20)
def test_they_are_asked_where_the_run_brings_its_worker(
    own_worker: type[InThreads],
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Rows], Rows],
    finished: bool,
) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", FIRST), tmp_path / "out.jsonl"
    asked = order(source, output, url, model="m")
    if finished:
        generate(asked, Interrupt())
    else:
        _stopped_before_the_output(asked, monkeypatch)
    assert own_worker.started == 1
    rows = change(FIRST)
    write_rows(source, rows)
    generate(asked, Interrupt())
    assert own_worker.started == 2
    wanted = [row["prompt"] for row in rows if row["prompt"] not in ("bad", 4)]
    assert [row["completion"] for row in read_rows(output)] == wanted
    assert len(read_rows(tmp_path / "out.errors.jsonl")) == len(rows) - len(wanted)


def _stopped_before_the_output(asked: bulk.Order, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise MillstreamError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(bulk, "publish", stopped)
        with pytest.raises(MillstreamError, match="full"):
            generate(asked, Interrupt())


def test_no_worker_is_started_where_nothing_is_to_be_asked(
    own_worker: type[InThreads], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", FIRST), tmp_path / "out.jsonl"
    asked = order(source, output, url, model="m")
    _stopped_before_the_output(asked, monkeypatch)
    generate(asked, Interrupt())
    write_rows(source, [*FIRST[:1], {"prompt": 5}])
    generate(asked, Interrupt())
    assert [row["completion"] for row in read_rows(output)] == ["a"]
    assert own_worker.started == 1


# -- names, which depend on other rows ---------------------------------------------------------------------------


def named(*names: object) -> Rows:
    return [{"prompt": f"p{number}", "name": name} for number, name in enumerate(names)]


@pytest.mark.parametrize("finished", [True, pytest.param(False, marks=pytest.mark.long)])
def test_whether_a_name_is_its_own_is_asked_of_the_rows_as_they_are_now(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", []), tmp_path / "out.jsonl"
    asked = order(source, output, url, bad_ids="rows", id_column="name")
    taken = "name is that of line {} too".format
    with FakeWorker(url) as worker:
        for names, bad, jobs in [
            (["a", "a", "c", "a", ""], {2: taken(1), 4: taken(1), 5: "name is empty"}, 2),
            (["b", "a", "c", "a", ""], {4: taken(2), 5: "name is empty"}, 4),  # rows 1 and 2
            (["b", "c", "c", "a", ""], {3: taken(2), 5: "name is empty"}, 6),  # rows 2 and 4; 3 was answered
            (["b", "c", "c", "a", "e"], {3: taken(2)}, 7),
            (["b", "e", "c", "a", "e"], {5: taken(2)}, 9),  # rows 2 and 3
        ]:
            write_rows(source, named(*names))
            if not finished:
                _stopped_before_the_output(asked, monkeypatch)
            generate(asked, Interrupt())
            errors = read_rows(tmp_path / "out.errors.jsonl")
            assert {row["line"]: row["error"]["message"] for row in errors} == bad
            assert [row["name"] for row in read_rows(output)] == [
                name for line, name in enumerate(names, 1) if line not in bad
            ]
            assert len(worker.answered) == jobs


def test_names_may_stand_in_another_column_after_the_end(url: str, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "name": "1"}, {"prompt": "b", "name": "2"}, {"prompt": 3, "name": "3"}]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with FakeWorker(url) as worker:
        for column, answered, failed, jobs in [("wrong", 0, 3, 0), ("name", 2, 1, 2), ("prompt", 2, 1, 2)]:
            generate(order(source, output, url, bad_ids="rows", id_column=column), Interrupt())
            assert len(read_rows(output)) == answered
            assert len(read_rows(tmp_path / "out.errors.jsonl")) == failed
            assert len(worker.answered) == jobs
    assert read_rows(tmp_path / "out.errors.jsonl")[0]["error"]["message"] == "prompt is no text"


def test_what_is_wrong_with_names_is_stored_once(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in.jsonl", named("a", "a", ""))
    asked = order(source, tmp_path / "out.jsonl", url, bad_ids="rows", id_column="name")
    sizes = []
    with FakeWorker(url):
        for _ in range(3):
            _stopped_before_the_output(asked, monkeypatch)
            sizes.append((tmp_path / "out.jsonl.run" / "spool").stat().st_size)
    assert len(set(sizes)) == 1
