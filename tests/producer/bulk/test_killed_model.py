"""Kills at random moments of a run with SmolLM2 in float32, greedy: its rows are those of an undisturbed run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.producer.bulk.killed import Runs, alone, disturbed

KILLS = 50
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
@pytest.mark.timeout(1500)
def test_killed_anywhere_the_rows_are_those_of_an_undisturbed_run_but_for_near_ties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_path: Path
) -> None:
    runs = Runs(tmp_path, ROWS, str(smollm2_path))
    alone(runs.state, monkeypatch)
    undisturbed = rows_of(runs.undisturbed(300))
    assert len(undisturbed) == len(ROWS)

    finished, _ = disturbed(runs, random.Random(5), KILLS, LONGEST_WAIT_S)
    for rows in map(rows_of, finished):
        assert [row["custom_id"] for row in rows] == [row["custom_id"] for row in undisturbed]
        for ours, theirs in zip(rows, undisturbed, strict=True):
            assert ours["completion"] == theirs["completion"] or parted_at_near_tie(ours, theirs), ours


def rows_of(finished: tuple[bytes, bytes]) -> list[dict[str, Any]]:
    """The rows of a run that came to its end, without errors."""
    output, errors = finished
    assert errors == b""
    return [json.loads(line) for line in output.splitlines()]


def parted_at_near_tie(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether the first token in which two answers differ was hardly likelier than the next."""
    told = zip(*(row["completions"][0]["logprobs"] for row in (ours, theirs)), strict=False)
    reference = next(one for other, one in told if other["token_id"] != one["token_id"])
    first, second = sorted((top["logprob"] for top in reference["top_logprobs"]), reverse=True)[:2]
    return bool(first - second < NEAR_TIE)
