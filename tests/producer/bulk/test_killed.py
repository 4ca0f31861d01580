"""Kills at random moments: of the run, its worker, its model process, its server, or of all at once."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.producer.bulk.killed import Runs, alone, disturbed

LONGEST_WAIT_S = 1.0
ROWS = [{"custom_id": f"{number}", "prompt": f"row {number}", "x": number / 7} for number in range(2000)]
BAD = {"prompt": 3, "custom_id": "bad"}


def as_it_is(output: bytes) -> bytes:
    return output


def in_any_order(output: bytes) -> bytes:
    return b"".join(sorted(output.splitlines(keepends=True)))


def begun_at_any_time(output: bytes) -> bytes:
    """Without the second in which the run began, which all its lines bear, however often it was gone on with."""
    (created,) = set(re.findall(rb'"created": ?\d+', output))
    return output.replace(created, b"")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("order", "what_counts", "kills", "whole"),
    [
        pytest.param({}, as_it_is, 50, 3, id="as it is"),
        pytest.param({"row_order": "completion"}, in_any_order, 15, 1, id="order completion"),
        pytest.param({"format": "openai"}, begun_at_any_time, 15, 1, id="format openai"),
    ],
)
def test_killed_anywhere_again_and_again_the_output_is_that_of_an_undisturbed_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    order: dict[str, Any],
    what_counts: Callable[[bytes], bytes],
    kills: int,
    whole: int,
) -> None:
    runs = Runs(tmp_path, [*ROWS[:1000], BAD, *ROWS[1000:]], "dry-run:echo", **order)
    alone(runs.state, monkeypatch)
    undisturbed, errors = runs.undisturbed(120)
    assert [one.count(b"\n") for one in (undisturbed, errors)] == [len(ROWS), 1]

    finished, killed = disturbed(runs, random.Random(23), kills, LONGEST_WAIT_S, whole=whole)
    assert all(what_counts(output) == what_counts(undisturbed) for output, _ in finished)
    assert all(told == errors for _, told in finished)
    assert min(killed.values()) > 0
