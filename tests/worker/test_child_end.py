"""A model process that meets a fault is gone at once, whatever its threads are at: its parent counts a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pytest

from protocol import Job, SamplingParams
from worker.frames import Load, Run, decode_from_model, encode, read

ERRORS = [
    "RuntimeError",
    "MemoryError",
    "RecursionError",
    "KeyboardInterrupt",
    "SystemExit",
    "PanicException",
]
DEADLINE_S = 20.0


class Child:
    """A model process of the tests' own."""

    def __init__(self, *args: str) -> None:
        child_read, self._write = os.pipe()
        self._read, child_write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.faulty_child", str(child_read), str(child_write), *args],
            pass_fds=(child_read, child_write),
            stderr=subprocess.PIPE,
        )
        os.close(child_read)
        os.close(child_write)
        self.sink: BinaryIO = os.fdopen(self._write, "wb")
        self.source: BinaryIO = os.fdopen(self._read, "rb")

    def say(self, *said: Any) -> None:
        self.sink.write(encode(said))
        self.sink.flush()

    def said(self) -> list[str]:
        """What it logs until it is gone."""
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        lines: list[str] = errors.decode().splitlines()
        return lines


@contextmanager
def child(*args: str) -> Iterator[Child]:
    one = Child(*args)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()
        one.sink.close()
        one.source.close()


def slow(job_id: str) -> Run:
    params = SamplingParams.model_validate({"bad_words": ["b"]})
    return Run(f"1:{job_id}#1", Job(id=job_id, prompt="a", params=params).encode(), [])


@pytest.mark.parametrize("error", ERRORS)
def test_a_fault_in_a_step_ends_the_process_whatever_is_being_prepared(error: str) -> None:
    with child("step", error) as one:
        one.say(Load("dry-run:echo", {}))
        body = read(one.source)
        assert body is not None, "it is ready"
        one.say(slow("slow"))
        assert one.process.stderr is not None
        assert one.process.stderr.readline() == b"under way\n"
        one.say(Run("1:a#2", Job(id="a", prompt="a").encode(), []))
        said = one.said()
        assert one.process.returncode == 1
        assert any(error in line for line in said), "the traceback"
        assert any("the model process ends" in line for line in said)
        body = read(one.source)
        assert body is not None, "that the job has begun is told before the step"
        decode_from_model(body)
        assert read(one.source) is None


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit"])
def test_a_fault_while_the_model_is_opened_ends_the_process(error: str) -> None:
    with child("open", error) as one:
        one.say(Load("dry-run:echo", {}))
        assert any("the model process ends" in line for line in one.said())
        assert one.process.returncode == 1
        assert read(one.source) is None


def test_a_fault_in_what_is_read_ends_the_process() -> None:
    """Whose reader is gone hears neither of jobs nor of its parent's end, and would stay for ever."""
    with child("step", "RuntimeError") as one:
        one.say(Load("dry-run:echo", {}))
        assert read(one.source) is not None, "it is ready"
        one.sink.write(encode([])[:-1] + b"\xc1")  # no MessagePack
        one.sink.flush()
        assert any("DecodeError" in line for line in one.said())
        assert one.process.returncode == 1
