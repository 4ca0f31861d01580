"""Where the time of steps went: each part is counted where it is spent, and together they are all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import loop as loop_module
from engine import stopwatch
from engine.choice import Choice
from engine.engine import Engine
from engine.sampling import Drawn
from tests.engine.doubles import PagedDouble, hashed, make_engine, request, run

SCHEDULE, FORWARD, LAUNCH, READ, OUTPUT = 1, 10, 100, 1000, 10_000


class Clock:
    """Stands still but where a part of a step is done; each part takes a time of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(loop_module, "perf_counter", lambda: self.now)

    def takes(self, seconds: int, owner: Any, name: str) -> None:
        """From now on a call of the function takes so long."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            self.now += seconds
            return call(*args, **named)

        self._monkeypatch.setattr(owner, name, timed)

    def watch(self, engine: Engine, runner: PagedDouble) -> None:
        """Give every part of the engine's steps its time."""
        self.takes(SCHEDULE, engine._scheduler, "schedule")
        self.takes(FORWARD, runner, "forward")
        self.takes(LAUNCH, loop_module, "launch")
        self.takes(READ, Drawn, "read")
        self.takes(OUTPUT, Choice, "append")


@pytest.mark.parametrize("overlap", [False, True])
def test_each_part_is_counted_where_it_is_spent(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """Two sequences of five tokens; with overlap the last tokens are read by a step that computes nothing."""
    runner = PagedDouble(hashed)
    engine = make_engine(runner, overlap=overlap)
    clock = Clock(monkeypatch)
    clock.watch(engine, runner)
    run(engine, [request(name, [5, 6, 7], 5) for name in ("a", "b")])
    steps = 5
    assert asdict(engine.stats().seconds) == {
        "schedule": SCHEDULE * (steps + overlap),
        "forward": FORWARD * steps,
        "sample": (LAUNCH + READ) * steps,
        "output": OUTPUT * 2 * steps,
    }
    assert sum(asdict(engine.stats().seconds).values()) == clock.now


def test_time_between_steps_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = PagedDouble(hashed)
    engine = make_engine(runner)
    clock = Clock(monkeypatch)
    clock.takes(FORWARD, runner, "forward")
    engine.add(request("a", [5], 3))
    while engine.has_work():
        clock.now += 77
        engine.step()
    assert sum(asdict(engine.stats().seconds).values()) == 3 * FORWARD


def test_a_pass_that_failed_has_taken_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = PagedDouble(hashed)
    engine = make_engine(runner)
    clock = Clock(monkeypatch)
    forward = runner.forward
    failures = iter([torch.OutOfMemoryError("no memory")])

    def failing(*args: Any) -> torch.Tensor:
        for error in failures:
            raise error
        return forward(*args)

    monkeypatch.setattr(runner, "forward", failing)
    clock.takes(FORWARD, runner, "forward")
    run(engine, [request(name, [5], 3) for name in ("a", "b")])
    assert engine.stats().output_tokens == 2 * 3
    assert engine.stats().seconds.forward == clock.now == (1 + len(runner.steps)) * FORWARD
