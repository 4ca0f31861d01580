"""A command that asks an output's rows differently, or writes them differently, than the run that is there."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from broker.connection import connect
from broker.keys import Keys
from broker.queue import Queue
from producer.bulk import begin
from producer.bulk.generate import generate
from producer.bulk.interrupt import Interrupt
from protocol import Job, SamplingParams
from tests.producer.bulk.orders import order, read_rows, write_rows
from tests.producer.bulk.test_stale import queue_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program


def told(job: Job) -> str:
    """What was asked, so that a kept answer can be told from a new one."""
    params = job.params
    return (
        f"{job.messages[-1].text if job.messages else job.prompt} {params.temperature} {params.token_limit}"
    )


def test_rows_are_asked_again_where_the_change_is_theirs(program: Program, url: str, tmp_path: Path) -> None:
    """F08: of the rows that say the parameter themselves, and of those that cannot be asked, nothing changes."""
    rows: list[dict[str, Any]] = [
        {"prompt": "a"},
        {"prompt": "b", "temperature": 0.2},
        {"prompt": 3},
        {"prompt": "c", "max_tokens": 9, "stop": ["x"], "logit_bias": {"5": 1.0}},
    ]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = ("generate", source, "-o", output, "--stop", "end", "--choice", "yes")
    with FakeWorker(url, answer=told) as worker:
        assert program(*command, "--temperature", "0").returncode == 3
        refused = program(*command, "--temperature", "0.7")
        assert (refused.returncode, "--redo-changed" in refused.stderr) == (2, True)
        assert "temperature: 0.0, now 0.7" in refused.stderr
        assert program(*command, "--temperature", "0.7", "--redo-changed").returncode == 3
        assert [row["completion"] for row in read_rows(output)] == ["a 0.7 None", "b 0.2 None", "c 0.7 9"]
        assert len(worker.answered) == 5
        assert len(read_rows(tmp_path / "out.errors.jsonl")) == 1

        again = ("--temperature", "0.7", "--redo-changed", "--max-tokens", "9")
        assert program(*command, *again).returncode == 3
        assert [row["completion"] for row in read_rows(output)] == ["a 0.7 9", "b 0.2 9", "c 0.7 9"]
        assert len(worker.answered) == 7
        assert "nothing to do" in program(*command, *again).stderr
        assert program(*command, *again, "--chat").returncode == 3
        assert len(worker.answered) == 10
        assert program(*command, *again, "--chat", "--overwrite").returncode == 2


@pytest.mark.long
def test_another_model_asks_every_row_again(url: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b", "temperature": 0.0}])
    output = tmp_path / "out.jsonl"
    with FakeWorker(url, model="one"):
        generate(order(source, output, url, model="one", queue="default"), Interrupt())
    with connect(url) as client:
        client.flushall()
    with FakeWorker(url, model="two", answer=lambda job: f"{job.model}") as worker:
        generate(order(source, output, url, model="two", queue="default", redo_changed=True), Interrupt())
        assert len(worker.answered) == 2
    assert [row["completion"] for row in read_rows(output)] == ["two", "two"]


@pytest.mark.parametrize("change", ["redo_changed", pytest.param("overwrite", marks=pytest.mark.long)])
def test_jobs_of_the_run_whose_place_is_taken_are_not_answered(url: str, tmp_path: Path, change: str) -> None:
    rows = [{"prompt": f"p{number}"} for number in range(4)]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    queue = Queue(connect(url), Keys("default"))
    spool = tmp_path / "out.jsonl.run" / "spool"
    with FakeWorker(url):
        generate(order(write_rows(tmp_path / "one.jsonl", rows[:1]), output, url), Interrupt())
    queue_rows(source, output, url, queue, 3)
    assert spool.stat().st_size > 0
    changed = order(source, output, url, defaults={"temperature": 0.5}, **{change: True})
    again = threading.Thread(target=generate, args=[changed, Interrupt()])
    again.start()
    answered: list[float | None] = []

    def noted(job: Job) -> str:
        answered.append(job.params.temperature)
        return "x"

    while not json.loads((tmp_path / "out.jsonl.run" / "manifest.json").read_text())["params"]:
        assert again.is_alive()
    while json.loads((tmp_path / "out.jsonl.run" / "manifest.json").read_text())["superseded"]:
        assert again.is_alive()
    with FakeWorker(url, answer=noted):
        again.join(20)
    assert answered == [0.5] * 4
    assert [key for key in queue.client.scan_iter() if b":job:" in key or b":done:" in key] == []
    queue.close()


@pytest.mark.long
def test_a_kill_while_rows_are_chosen_again_loses_nothing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "temperature": 0.0}]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with FakeWorker(url, answer=told) as worker:
        generate(order(source, output, url), Interrupt())
        changed = order(source, output, url, defaults={"temperature": 0.5}, redo_changed=True)
        for moment in ("ask", "Spool"):
            with monkeypatch.context() as patch:
                patch.setattr(begin, moment, lambda *_: {}["killed"])
                with pytest.raises(KeyError):
                    generate(changed, Interrupt())
        generate(changed, Interrupt())
        assert [row["completion"] for row in read_rows(output)] == ["a 0.5 None", "b 0.0 None"]
        assert len(worker.answered) == 3


def test_rows_may_stand_in_the_order_in_which_they_finished(
    program: Program, url: str, tmp_path: Path
) -> None:
    rows = [{"prompt": f"p{number}", "max_tokens": number % 3 * 40 + 9} for number in range(9)]
    rows.append({"prompt": 3})
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = ("generate", source, "-o", output)
    prompts: list[str] = []

    def noted(job: Job) -> str:
        prompts.append(str(job.prompt))
        return "x"

    with FakeWorker(url, answer=noted) as worker:
        assert program(*command, "--order", "completion").returncode == 3
        finished = [row["prompt"] for row in read_rows(output)]
        assert finished == prompts != sorted(prompts)
        write_rows(source, [{"prompt": "p9"}, *rows[1:]])
        assert program(*command, "--order", "completion").returncode == 3
        assert [row["prompt"] for row in read_rows(output)] == [*(p for p in finished if p != "p0"), "p9"]
        assert program(*command).returncode == 3
        assert [row["prompt"] for row in read_rows(output)] == ["p9", *(f"p{n}" for n in range(1, 9))]
        assert len(worker.answered) == 10
        assert len(read_rows(tmp_path / "out.errors.jsonl")) == 1
        assert "nothing to do" in program(*command).stderr


@pytest.mark.long
def test_a_damaged_manifest_is_refused_resumed_or_overwritten(
    program: Program, url: str, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    output, manifest = tmp_path / "out.jsonl", tmp_path / "out.jsonl.run" / "manifest.json"
    with FakeWorker(url) as worker:
        for flags, jobs in [((), 2), (("--resume",), 2), (("--overwrite",), 4)]:
            assert program("generate", source, "-o", output, *flags).returncode == 0
            assert len(worker.answered) == jobs
            manifest.write_text('{"v": 1, "run')
            refused = program("generate", source, "-o", output)
            assert (refused.returncode, "damaged" in refused.stderr) == (2, True)


def test_a_manifest_keeps_what_the_command_gave_and_nothing_else(tmp_path: Path) -> None:
    defaults = {"stop": ["a"], "logit_bias": {5: 1.0}, "response_format": {"type": "json_object"}, "n": 1}
    asked = begin.Manifest.new(None, defaults, {"chat_template_kwargs": {"x": 1}})
    asked.save(tmp_path / "manifest.json")
    found = begin.Manifest.load(tmp_path / "manifest.json")
    assert found is not None
    assert found.params == SamplingParams(**defaults)
    assert found.params.model_fields_set == defaults.keys()
    assert found.differences(asked) == []
    same = [
        begin._question(begin.Line(1, b'{"prompt": "x"}'), begin._requests(one)) for one in (found, asked)
    ]
    assert isinstance(same[0], Job)
    assert same[0] == same[1]


@pytest.mark.parametrize("name", ["out.jsonl", pytest.param("out.parquet", marks=pytest.mark.long)])
def test_a_deleted_error_file_is_missed_only_where_it_held_rows(
    program: Program, url: str, tmp_path: Path, name: str
) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / name
    errors = output.with_name(f"out.errors{output.suffix}")
    command = ("generate", source, "-o", output)
    with FakeWorker(url) as worker:
        assert program(*command).returncode == 0
        errors.unlink()
        before = output.read_bytes()
        again = program(*command)
        assert (again.returncode, "nothing to do" in again.stderr) == (0, True)
        refused = program(*command, "--temperature", "0.5")
        assert (refused.returncode, "temperature" in refused.stderr) == (2, True)
        assert (output.read_bytes(), len(worker.answered)) == (before, 2)

        write_rows(source, [{"prompt": "a"}, {"prompt": "c"}, {"prompt": 3}])
        assert program(*command).returncode == 3
        assert (errors.exists(), len(worker.answered)) == (True, 3)
        errors.unlink()
        before = output.read_bytes()
        refused = program(*command)
        assert (refused.returncode, "error file was changed or deleted" in refused.stderr) == (2, True)
        assert (output.read_bytes(), len(worker.answered)) == (before, 3)
        if name == "out.jsonl":
            assert program(*command, "--resume").returncode == 3
            assert (len(read_rows(errors)), len(worker.answered)) == (1, 3)
        output.unlink()
        assert program(*command).returncode == 3
        assert len(worker.answered) == 5, "without its output a run begins anew"


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--temperature", "0.5"], 2, "differently"),
        pytest.param(["--id-column", "name"], 2, "name is missing", marks=pytest.mark.long),
        pytest.param(
            ["--overwrite", "--redis-url", "redis://127.0.0.1:1", "--redis-timeout", "0"],
            1,
            "nobody listens",
            marks=pytest.mark.long,
        ),
    ],
)
def test_copies_of_the_input_go_however_a_run_ends(
    program: Program, url: str, tmp_path: Path, flags: list[str], code: int, words: str
) -> None:
    output = tmp_path / "out.jsonl"
    command = ("generate", "-", "-o", output)
    rows = '{"prompt": "a"}\n{"prompt": "b"}\n'
    with FakeWorker(url):
        assert program(*command, stdin=rows).returncode == 0
        stopped = program(*command, *flags, stdin=rows)
    assert (stopped.returncode, words in stopped.stderr) == (code, True)
    assert list((tmp_path / "out.jsonl.run").glob("input-*")) == []


def test_a_copy_that_was_begun_goes_too(program: Program, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text('{"prompt": "a"}\n')
    urls = [f"file://{tmp_path}/{name}.jsonl" for name in ("there", "missing")]
    refused = program("generate", *urls, "-o", tmp_path / "out.jsonl")
    assert (refused.returncode, "missing.jsonl" in refused.stderr) == (2, True)
    assert list((tmp_path / "out.jsonl.run").glob("input-*")) == []
