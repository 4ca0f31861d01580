"""The benchmark of the planned order: what it counts is what the order is for."""

from __future__ import annotations

from typing import Any

import pytest

from bench import plan
from bench.plan import Work
from engine.limits import BLOCK_SIZE
from tests.bench.doubles import Words


@pytest.fixture(scope="module")
def work() -> Work:
    return Work.made(Words(), topics=24, questions=8)


def fewest_by_blocks(work: Work) -> int:
    """Prompt tokens to compute if each whole block is computed once, and what is no whole block for each row."""
    whole, rest = set(), 0
    for row in work.rows:
        full = (len(row.prompt_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        whole |= {tuple(row.prompt_ids[:end]) for end in range(BLOCK_SIZE, full + 1, BLOCK_SIZE)}
        rest += len(row.prompt_ids) - full
    return BLOCK_SIZE * len(whole) + rest


def test_in_the_planned_order_each_prefix_is_computed_once_with_room_for_few(work: Work) -> None:
    assert sorted(row.prompt_ids for row in work.planned()) == sorted(row.prompt_ids for row in work.rows)
    found = plan.count(work, held=[2])
    pool = found["pools"][0]
    assert found["fewest"] == work.fewest <= fewest_by_blocks(work) < work.tokens / 3
    # A short prefix that is being computed is not waited for: a block may be computed twice.
    assert fewest_by_blocks(work) <= pool["planned"]["prefilled"] < 1.01 * fewest_by_blocks(work)
    assert pool["file"]["prefilled"] > 1.5 * pool["planned"]["prefilled"]
    assert pool["planned"]["steps"] < pool["file"]["steps"]


def test_the_tables_have_a_line_an_order(work: Work) -> None:
    one: dict[str, Any] = {"seconds": 10.0, "computed": work.fewest, "cached": 5}
    run = {
        "topics": 24,
        "rows": 192,
        "fewest": work.fewest,
        "blocks": 99,
        "orders": {"file": one, "planned": one},
    }
    figures = {"model": "m", "dtype": "float32", "counted": plan.count(work, held=[2]), "run": run}
    tables = plan.tables(figures)
    assert [line.split(" | ")[2] for line in tables["plan.counted"].splitlines()[4:]] == ["file", "planned"]
    assert tables["plan.run"].splitlines()[-1] == f"| planned | 10.0 | 19.20 | {work.fewest:,} | 1.00 | 5 |"
