"""A model process whose engine raises something in a step or while it is opened, and never gets done with a job that
takes long to prepare. Run as `python -m tests.worker.faulty_child READ_FD WRITE_FD step|open ERROR`.
"""

from __future__ import annotations

import builtins
import sys
import threading

import worker.child
from engine.dry_run import DryRequest, DryRunEngine, Options
from engine.interface import Delta, EngineCore
from protocol import Job
from worker.frames import Load


class PanicException(BaseException):
    """What a library in Rust raises when it panics: no Exception."""


def error() -> BaseException:
    """What is raised."""
    name = sys.argv[4]
    kind = PanicException if name == "PanicException" else getattr(builtins, name)
    raised: BaseException = kind(*([0] if name == "SystemExit" else ["a fault of a test's"]))
    return raised


class Faulty(DryRunEngine):
    """The engine."""

    def prepare(self, job: Job) -> DryRequest:
        if job.params.bad_words:
            print("under way", file=sys.stderr, flush=True)
            threading.Event().wait()
        return super().prepare(job)

    def step(self) -> list[Delta]:
        raise error()


def open_engine(load: Load) -> EngineCore:  # noqa: ARG001
    if sys.argv[3] == "open":
        threading.Thread(
            target=threading.Event().wait
        ).start()  # as a library that loads weights may have some
        raise error()
    return Faulty("echo", Options())


if __name__ == "__main__":
    worker.child.open_engine = open_engine
    worker.child.main()
