"""Fifty kills at random moments: of the run, its worker, its model process, its server, or of all at once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.producer.bulk.killed import Runs, alone, disturbed
from tests.producer.bulk.processes import ended

KILLS = 50
LONGEST_WAIT_S = 1.0
ROWS = [{"custom_id": number, "prompt": f"row {number}", "x": number / 7} for number in range(2000)]
BAD = {"prompt": 3, "custom_id": "bad"}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_anywhere_fifty_times_the_output_is_that_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(tmp_path, [*ROWS[:1000], BAD, *ROWS[1000:]], "dry-run:echo")
    alone(runs.state, monkeypatch)
    runs.start()
    assert ended(runs.child, 120) == 0
    undisturbed = runs.finished()
    assert [one.count(b"\n") for one in undisturbed] == [len(ROWS), 1]

    finished, killed = disturbed(runs, random.Random(23), KILLS, LONGEST_WAIT_S, whole=3)
    assert all(one == undisturbed for one in finished)
    assert min(killed.values()) > 0
