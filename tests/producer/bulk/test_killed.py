"""Fifty kills at random moments: of the run, its worker, its model process, its server, or of all at once."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.producer.bulk.killed import ALL, RUN, VICTIMS, Runs, alone
from tests.producer.bulk.processes import ended, family, wait_for

KILLS = 50
LONGEST_WAIT_S = 1.0
MAY_END = ("the worker for dry-run:echo ended", "did not start")
"""Why a run may end: a worker died before its first answer or again and again, a server while it started."""
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

    draw = random.Random(23)
    kills = dict.fromkeys(VICTIMS, 0)
    whole = 0
    runs.start()
    while sum(kills.values()) < KILLS or whole < 3:
        victim = draw.choice(VICTIMS) if sum(kills.values()) < KILLS else None
        code = ended(runs.child, draw.uniform(0.0, LONGEST_WAIT_S) if victim else 120)
        if code is None and victim is not None:
            kills[victim] += runs.kill(victim)
            if victim not in (RUN, ALL):
                continue
            code = ended(runs.child, 20)
            assert code in (-signal.SIGKILL, 0)
        if code == 0:
            assert runs.finished() == undisturbed
            whole += 1
        elif code == 1:
            assert any(reason in runs.why() for reason in MAY_END)
        else:
            assert code == -signal.SIGKILL
        runs.start()
    os.kill(runs.child, signal.SIGKILL)
    assert ended(runs.child, 20) is not None
    assert min(kills.values()) > 0
    assert wait_for(lambda: family(runs.state) == [], 30)
