"""Runs that are killed or interrupted at any moment, and gone on with."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from producer.bulk.interrupt import Interrupt
from tests.producer.bulk.orders import read_rows, run, write_rows
from tests.producer.bulk.processes import ended, family, members, wait_for
from tests.producer.fake_worker import FakeWorker, echo


def fork(source: Path, output: Path, url: str) -> int:
    """Run in a child process that needs no imports: kills then fall into the run and not before it. Its pid."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(source, output, url)
            code = 0
        finally:
            os._exit(code)
    return child


def slowly(job: object) -> str:
    time.sleep(0.001)
    return echo(job)  # type: ignore[arg-type]


def test_killed_at_any_moment_it_ends_as_if_undisturbed_and_nothing_runs_twice(
    url: str, tmp_path: Path
) -> None:
    rows = [{"custom_id": number, "prompt": f"row {number}"} for number in range(800)]
    source = write_rows(tmp_path / "in.jsonl", [*rows, {"prompt": 3}])
    with FakeWorker(url):
        run(source, tmp_path / "undisturbed.jsonl", url)
    draw = random.Random(7)
    kills = 0
    with FakeWorker(url, answer=slowly) as worker:
        while True:
            child = fork(source, tmp_path / "out.jsonl", url)
            code = ended(child, draw.uniform(0.02, 1.0))
            if code is not None:
                break
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            kills += 1
            assert kills < 200
    assert code == 0
    assert kills >= 1
    for name in ("{}.jsonl", "{}.errors.jsonl"):
        assert (tmp_path / name.format("out")).read_bytes() == (
            tmp_path / name.format("undisturbed")
        ).read_bytes()
    assert len(worker.answered) == len(set(worker.answered)) == 800


class Alone:
    """`millstream generate` as its own process, with an embedded broker and a worker of its own."""

    def __init__(self, folder: Path, model: str) -> None:
        self.state = folder / "state"
        self.source = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self._model = model
        inherited = {name: value for name, value in os.environ.items() if not name.endswith("REDIS_URL")}
        self._environ = {**inherited, "MILLSTREAM_STATE": str(self.state), "MILLSTREAM_BROKER_IDLE_S": "2"}

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "millstream", "generate", self.source, "-o", self.output]
        return subprocess.Popen(
            [*command, "--model", self._model, "--json", *flags],
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def owner(self) -> int | None:
        """The process that holds, or held, the output."""
        lock = self.output.with_name("out.jsonl.run") / "lock"
        words = lock.read_text().split() if lock.exists() else []
        return int(words[0]) if words else None


def test_with_a_worker_of_its_own_it_leaves_nothing_behind(tmp_path: Path) -> None:
    alone = Alone(tmp_path, "dry-run:echo")
    write_rows(alone.source, [{"prompt": f"row {number}"} for number in range(5)])
    process = alone.start()
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert json.loads(out)["answered"] == 5
    assert [row["completion"] for row in read_rows(alone.output)] == [f"row {number}" for number in range(5)]
    assert family(alone.state) == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_ctrl_c_is_130_and_the_same_command_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    alone = Alone(tmp_path, "dry-run:words?delay=20ms")
    write_rows(alone.source, [{"prompt": f"row {number}"} for number in range(300)])
    process = alone.start("--window", "1")  # a row takes two steps: far from done when it is told to stop
    spool = tmp_path / "out.jsonl.run" / "spool"
    assert wait_for(lambda: spool.exists() and spool.stat().st_size > 0, 60)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, b"Traceback" in errors) == (130, False)
    assert family(alone.state) == []
    again = alone.start()
    out, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert json.loads(out)["kept"] > 0
    assert [row["completion"] for row in read_rows(alone.output)] == [
        f"row {number}" for number in range(300)
    ]


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    alone = Alone(tmp_path, "dry-run:nothing-of-the-kind")
    write_rows(alone.source, [{"prompt": "a"}])
    process = alone.start()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"nothing-of-the-kind" in errors.splitlines()[-1]
    assert b"Traceback" not in errors
    assert family(alone.state) == []


def test_an_interrupt_waits_for_the_end_of_a_step_and_a_second_one_does_not() -> None:
    interrupt = Interrupt()
    interrupt.check()
    with without_handlers():
        interrupt.listen()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    waiting = Interrupt()
    with without_handlers():
        waiting.listen()
        with pytest.raises(KeyboardInterrupt), waiting.at_once():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), waiting.at_once():
            pytest.fail("it was told to stop before")


@contextmanager
def without_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.long
@pytest.mark.parametrize("victim", [" worker ", "valkey-server"])
def test_its_worker_or_its_broker_may_be_killed(tmp_path: Path, victim: str) -> None:
    alone = Alone(tmp_path, "dry-run:words?delay=20ms")
    write_rows(alone.source, [{"prompt": f"row {number} of many"} for number in range(3000)])
    process = alone.start()
    spool = tmp_path / "out.jsonl.run" / "spool"
    assert wait_for(lambda: spool.exists() and spool.stat().st_size > 0, 60)
    for killed, words in members(alone.state):
        if victim in words and killed.pid != process.pid:
            killed.kill()
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert json.loads(out)["answered"] == 3000
    assert victim != " worker " or b"was started again" in errors
    assert [row["completion"] for row in read_rows(alone.output)] == [
        f"row {number} of many" for number in range(3000)
    ]
    assert family(alone.state) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fifty_interruptions_leave_at_most_one_broker_and_no_worker(tmp_path: Path) -> None:
    alone = Alone(tmp_path, "dry-run:words?delay=20ms&slots=8")
    rows = [f"row {number} of many" for number in range(12_000)]
    write_rows(alone.source, [{"prompt": row} for row in rows])
    draw = random.Random(11)
    for _ in range(50):
        process = alone.start()
        how = draw.choice([signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
        assert wait_for(lambda pid=process.pid: alone.owner() == pid, 60)  # before that nothing has begun
        time.sleep(draw.uniform(0.0, 3.0))
        process.send_signal(how)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130), errors
        assert wait_for(lambda: not [one for one in family(alone.state) if " worker " in one], 15)
        assert sum("valkey-server" in one for one in family(alone.state)) <= 1
    process = alone.start()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert [row["completion"] for row in read_rows(alone.output)] == rows
    assert wait_for(lambda: family(alone.state) == [], 15)
