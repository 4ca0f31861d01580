"""What a worker says of the last minute."""

from __future__ import annotations

import pytest

from worker import figures
from worker.figures import WINDOW_S, Figures

ZERO = {
    "running": 0,
    "waiting": 0,
    "slots": 8,
    "kv_blocks_used": 0,
    "kv_blocks_total": 100,
    "steps": 0,
    "slot_steps": 0,
    "prompt_tokens": 0,
    "cached_tokens": 0,
    "output_tokens": 0,
    "preemptions": 0,
    "recomputed_tokens": 0,
    "padding_rows": 0,
    "graph_steps": 0,
    "evictions": 0,
    "kv_tokens_allocated": 0,
    "kv_tokens_unused": 0,
    "schedule": 0.0,
    "forward": 0.0,
    "sample": 0.0,
    "output": 0.0,
}
LATER = ZERO | {
    "running": 6,
    "waiting": 1900,
    "kv_blocks_used": 64,
    "steps": 100,
    "slot_steps": 600,
    "prompt_tokens": 900,
    "cached_tokens": 100,
    "output_tokens": 600,
    "preemptions": 3,
    "recomputed_tokens": 15,
    "padding_rows": 500,
    "graph_steps": 84,
    "kv_tokens_allocated": 10_000,
    "kv_tokens_unused": 310,
    "schedule": 0.4,
    "forward": 36.8,
    "sample": 2.0,
    "output": 0.8,
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds; what the time is, is the last."""
    times = [1000.0]
    monkeypatch.setattr(figures.time, "monotonic", lambda: times[-1])
    return times


def test_shares_are_of_what_the_last_minute_added(clock: list[float]) -> None:
    told = Figures()
    assert told.now == {}
    assert told.lately() == {}
    assert told.line() is None
    told.note(ZERO | {"output_tokens": 5_000_000, "steps": 7, "forward": 900.0})
    clock.append(1030.0)
    told.note(LATER | {"output_tokens": 5_000_600, "steps": 107, "forward": 936.8})
    assert told.lately() == {
        "tokens_per_s": 20.0,
        "read_per_s": 33.3333,
        "slots_used": 0.75,
        "kv_used": 0.64,
        "kv_unused": 0.031,
        "cached": 0.1,
        "computed_twice": 0.01,
        "padding": 0.25,
        "graphs": 0.84,
        "preemptions": 3,
        "step_ms": 400.0,
        "schedule": 0.01,
        "forward": 0.92,
        "sample": 0.05,
        "output": 0.02,
    }


def test_one_line_a_stretch_of_work(clock: list[float]) -> None:
    told = Figures()
    told.note(ZERO)
    clock.append(1030.0)
    told.note(LATER)
    assert told.line() == (
        "running 6, waiting 1,900: 20 tokens/s, slots 75%, KV 64% (3.1% unused), cache 10%, preempted 3 "
        "(1.0% computed twice), step 400.0 ms: schedule 1% forward 92% sample 5% output 2%"
    )
    assert told.line() is None, "nothing was done since"
    told.note(LATER | {"steps": 101})
    assert told.line() is not None


def test_what_lies_longer_back_is_left_out(clock: list[float]) -> None:
    told = Figures()
    for second in range(1000):
        clock.append(2000.0 + second)
        told.note(LATER | {"output_tokens": second * second, "steps": second})
    assert told.lately()["tokens_per_s"] == pytest.approx((999**2 - 939**2) / WINDOW_S)
    clock.append(5000.0)
    assert told.lately() == {}
    assert told.now["steps"] == 999


def test_an_engine_without_kv_has_no_share_of_it(clock: list[float]) -> None:
    told = Figures()
    told.note(ZERO | {"kv_blocks_total": 0})
    clock.append(1010.0)
    told.note(ZERO | {"kv_blocks_total": 0, "steps": 4, "output_tokens": 4, "forward": 0.1})
    assert set(told.lately()) & {"kv_used", "kv_unused", "padding"} == {"padding"}
    assert told.line() is not None
