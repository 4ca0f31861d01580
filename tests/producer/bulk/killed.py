"""Runs that are killed, whole or in part, and go on."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from producer.bulk.generate import generate
from producer.bulk.interrupt import Interrupt
from protocol import MillstreamError
from tests.producer.bulk.orders import order, write_rows
from tests.producer.bulk.processes import ended, family, members, wait_for

RUN, ALL = "run", "all"
VICTIMS = (RUN, ALL, " worker ", "worker.child", "valkey-server")
MAY_END = ("the worker for ", "did not start")
"""Why a run may end: a worker died before its first answer or again and again, a server while it started."""


def alone(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs bring a server of their own, with its state in this folder."""
    for name in list(os.environ):
        if name.endswith("REDIS_URL"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MILLSTREAM_STATE", str(state))
    monkeypatch.setenv("MILLSTREAM_BROKER_IDLE_S", "2")


class Runs:
    """Runs of the same input, one after the other, each in a forked process with a worker and a server of its own."""

    def __init__(self, folder: Path, rows: Iterable[dict[str, Any]], model: str, **changes: Any) -> None:
        """
        Args:
            changes: fields of the order that differ from a plain command line's.
        """
        self.state = folder / "state"
        self._source = write_rows(folder / "in.jsonl", rows)
        self._changes = {"model": model, "redis_url": None, **changes}
        self._folder = folder
        self._done = 0
        self.child = 0

    @property
    def output(self) -> Path:
        """Of the run that is going on."""
        return self._folder / f"out-{self._done}.jsonl"

    def start(self) -> None:
        """Begin the run, or go on with it. The process needs no imports, so kills fall into the run itself."""
        self.child = os.fork()
        if self.child:
            return
        code = 2
        try:
            asked = order(self._source, self.output, "", **self._changes)
            generate(asked, Interrupt())
            code = 0
        except MillstreamError as error:
            (self._folder / "why").write_text(str(error))
            code = 1
        finally:
            os._exit(code)

    def undisturbed(self, seconds: float) -> tuple[bytes, bytes]:
        """Output and errors of a whole run that nobody kills."""
        self.start()
        code = ended(self.child, seconds)
        assert code == 0, self.why() if code == 1 else f"it ended with {code}"
        return self.finished()

    def finished(self) -> tuple[bytes, bytes]:
        """Output and errors of a run that came to its end; the next one has an output of its own."""
        output, errors = self.output, self.output.with_suffix(".errors.jsonl")
        self._done += 1
        return output.read_bytes(), errors.read_bytes()

    def kill(self, victim: str) -> bool:
        """Kill it, or all; whether there was such a process."""
        killed = False
        if victim in (RUN, ALL):
            os.kill(self.child, signal.SIGKILL)
            killed = True
        for process, words in members(self.state):
            if victim == ALL or victim in words:
                try:
                    process.kill()
                    killed = True
                except psutil.NoSuchProcess:
                    continue
        return killed

    def why(self) -> str:
        """What the last run that stopped had to say."""
        return (self._folder / "why").read_text()


def disturbed(
    runs: Runs, draw: random.Random, kills: int, longest_wait_s: float, whole: int = 1
) -> tuple[list[tuple[bytes, bytes]], dict[str, int]]:
    """Start runs, kill something of them `kills` times, and go on until `whole` of them have come to their end.

    Returns:
        Outputs and errors of those that did, and how often each victim was killed.
    """
    finished: list[tuple[bytes, bytes]] = []
    killed = dict.fromkeys(VICTIMS, 0)
    runs.start()
    while sum(killed.values()) < kills or len(finished) < whole:
        victim = _next(draw, killed) if sum(killed.values()) < kills else None
        code = ended(runs.child, draw.uniform(0.0, longest_wait_s) if victim else 300)
        if code is None and victim is not None:
            killed[victim] += runs.kill(victim)
            if victim not in (RUN, ALL):
                continue
            code = ended(runs.child, 20)
            assert code in (-signal.SIGKILL, 0, 1)
        if code == 0:
            finished.append(runs.finished())
        elif code == 1:
            assert any(reason in runs.why() for reason in MAY_END), runs.why()
        else:
            assert code == -signal.SIGKILL
        runs.start()
    runs.kill(RUN)
    assert ended(runs.child, 20) is not None
    assert wait_for(lambda: family(runs.state) == [], 30)
    return finished, killed


def _next(draw: random.Random, killed: dict[str, int]) -> str:
    """One of those killed least, so that each has its share: a run is not always old enough to have them all."""
    return draw.choice([victim for victim, times in killed.items() if times == min(killed.values())])
