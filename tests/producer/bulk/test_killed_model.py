"""Kills at random moments of a run with SmolLM2 in float32, greedy: its rows are those of an undisturbed run."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.producer.bulk.killed import ALL, RUN, VICTIMS, Runs, alone
from tests.producer.bulk.processes import ended, family, wait_for

KILLS = 10
LONGEST_WAIT_S = 6.0
"""A worker loads the model in two to four seconds, and the rows take about five."""
NEAR_TIE = 1e-3
"""Between the likeliest two tokens, as log-probabilities: nearer ones may change places by rounding."""
TOPICS = ("a mill", "rivers", "bread", "the sea", "winter", "a clock", "horses", "glass")
ROWS = [
    {
        "custom_id": f"{topic} {number}",
        "messages": [{"role": "user", "content": f"Write {number} sentences about {topic}."}],
        "temperature": 0,
        "max_tokens": 24 + number,
        "logprobs": 2,
    }
    for topic in TOPICS
    for number in range(3, 6)
]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_anywhere_the_rows_are_those_of_an_undisturbed_run_but_for_near_ties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_path: Path
) -> None:
    runs = Runs(tmp_path, ROWS, str(smollm2_path))
    alone(runs.state, monkeypatch)
    runs.start()
    assert ended(runs.child, 300) == 0
    undisturbed = rows_of(runs)
    assert len(undisturbed) == len(ROWS)

    draw = random.Random(5)
    kills = dict.fromkeys(VICTIMS, 0)
    whole = []
    runs.start()
    while sum(kills.values()) < KILLS or not whole:
        victim = draw.choice(VICTIMS) if sum(kills.values()) < KILLS else None
        code = ended(runs.child, draw.uniform(0.0, LONGEST_WAIT_S) if victim else 300)
        if code is None and victim is not None:
            kills[victim] += runs.kill(victim)
            if victim not in (RUN, ALL):
                continue
            code = ended(runs.child, 20)
            assert code in (-signal.SIGKILL, 0)
        if code == 0:
            whole.append(rows_of(runs))
        elif code == 1:  # a worker that dies before its first answer, or again and again
            assert "ended" in runs.why()
        else:
            assert code == -signal.SIGKILL
        runs.start()
    runs.kill(ALL)
    assert ended(runs.child, 20) is not None
    assert wait_for(lambda: family(runs.state) == [], 30)

    for rows in whole:
        assert [row["custom_id"] for row in rows] == [row["custom_id"] for row in undisturbed]
        for ours, theirs in zip(rows, undisturbed, strict=True):
            assert ours["completion"] == theirs["completion"] or parted_at_near_tie(ours, theirs), ours


def rows_of(runs: Runs) -> list[dict[str, Any]]:
    """The rows of a run that came to its end, without errors."""
    output, errors = runs.finished()
    assert errors == b""
    return [json.loads(line) for line in output.splitlines()]


def parted_at_near_tie(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether the first token in which two answers differ was hardly likelier than the next."""
    told = zip(*(row["completions"][0]["logprobs"] for row in (ours, theirs)), strict=False)
    reference = next(one for other, one in told if other["token_id"] != one["token_id"])
    first, second = sorted((top["logprob"] for top in reference["top_logprobs"]), reverse=True)[:2]
    return bool(first - second < NEAR_TIE)
