"""A bound on the time of a step: the budget follows, decodes and prompts go on."""

from __future__ import annotations

import itertools

import pytest

from engine import loop as loop_module
from engine.pace import LEAST, Pace
from tests.engine.doubles import PagedDouble, alone, hashed, make_engine, request, run, token_ids


@pytest.mark.parametrize(
    ("ms_a_token", "settles"), [(1.0, (70, 100)), (0.1, (512, 512)), (50.0, (LEAST, LEAST))]
)
def test_it_settles_below_the_bound(ms_a_token: float, settles: tuple[int, int]) -> None:
    pace = Pace(512, 100)
    budgets = []
    for _ in range(60):
        budgets.append(pace.budget)
        pace.note(pace.budget, pace.budget * ms_a_token / 1000)
    assert all(settles[0] <= budget <= settles[1] * 1.25 + 1 for budget in budgets[20:])


def test_small_steps_say_nothing_of_large_ones() -> None:
    pace = Pace(512, 100)
    pace.note(512, 0.2)
    assert pace.budget == 256
    pace.note(20, 0.01)
    assert pace.budget == 256
    pace.note(256, 0.09)
    assert pace.budget == 321


def test_without_a_bound_it_is_the_most() -> None:
    pace = Pace(512, None)
    pace.note(512, 1e9)
    assert pace.budget == 512


def test_steps_shrink_and_nobody_is_starved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which a token takes 10 ms: 25 fit into the bound, and nine decodes alone are within it."""
    runner = PagedDouble(hashed, num_kv_blocks=200)
    now = 0.0

    def clock() -> float:
        return now

    def forward_takes_time() -> None:
        nonlocal now
        now += 0.01 * pending[0]

    pending = [0]
    engine = make_engine(runner, max_num_batched_tokens=128, max_step_ms=250)
    schedule = engine._scheduler.schedule

    def watched(*budgets: int) -> object:
        plan = schedule(*budgets)
        pending[0] = sum(count for _, count in plan.chunks)
        return plan

    monkeypatch.setattr(engine._scheduler, "schedule", watched)
    monkeypatch.setattr(loop_module, "perf_counter", clock)
    runner.before_forward = forward_takes_time
    requests = [request(f"r{i}", [3 + i] * 60, 20) for i in range(12)]
    out = run(engine, requests)
    sizes = [sum(step.sizes) for step in runner.steps]
    assert sizes[0] == 128
    assert max(itertools.islice(sizes, 1, None)) <= 25 * 1.25 + 1 + LEAST
    for new in requests:
        assert token_ids(out[new.id]) == alone(new)
