"""What a run shows while it goes on."""

from __future__ import annotations

import re
from typing import Any

import pytest

from broker.calls import WorkerBeat
from producer.bulk import progress
from producer.bulk.progress import Bar, Counts, Lines, Silence, Speed, display

SPEED = Speed(workers=2, written_per_s=300.4, read_per_s=1700.0, cached=0.43)


def beat(age_ms: int = 0, **info: Any) -> WorkerBeat:
    return WorkerBeat("w", age_ms, info)


def test_the_speed_is_that_of_the_living_workers_together() -> None:
    busy = beat(lately={"tokens_per_s": 100.0, "read_per_s": 300.0, "cached": 0.5})
    reading = beat(lately={"tokens_per_s": 20.0, "read_per_s": 100.0})
    gone = beat(age_ms=3_600_000, lately={"tokens_per_s": 500.0, "read_per_s": 500.0})
    told = Speed.of([busy, reading, gone, beat(lately={}), beat()])
    assert told == Speed(workers=4, written_per_s=120.0, read_per_s=400.0, cached=0.375)
    assert Speed.of([]) == Speed.of([gone]) == Speed()


def test_lines_for_logs_come_when_something_was_done_or_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: times[-1])
    lines = display(2000, quiet=False)
    assert isinstance(lines, Lines)

    def said(seconds: float, done: int) -> bool:
        times.append(times[-1] + seconds)
        lines.show(Counts(2000, answered=done))
        return bool(capsys.readouterr().err)

    assert [said(9.0, 1500), said(1.0, 1500)] == [False, True]
    assert [said(20.0, 1599), said(39.9, 1599), said(0.2, 1599)] == [False, False, True]
    assert [said(10.0, 1698), said(0.0, 1699)] == [False, True]


def test_a_line_says_where_the_run_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LONGEST_SILENCE_S", 0.0)
    counts = Counts(2000, answered=1000, failed=3, kept=503, ended=500)
    counts.prompt_tokens, counts.completion_tokens, counts.speed = 90_000, 10_000, SPEED
    Lines().show(counts)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "millstream: 1,003 of 2,000 rows, 3 failed; 2 workers read 1,700 and write 300 tokens/s, 43% of prompts "
        "cached; 1 min 40 s left\n"
    )


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        (Counts(0), "0 of 0 rows"),
        (Counts(9), "0 of 9 rows"),
        (Counts(9, failed=9), "9 of 9 rows, 9 failed"),
        (Counts(9, speed=Speed(workers=1)), "0 of 9 rows; 1 worker"),
        (Counts(9, speed=Speed(2, written_per_s=3.0)), "0 of 9 rows; 2 workers read 0 and write 3 tokens/s"),
        (
            Counts(9, answered=8, ended=8, completion_tokens=8, speed=Speed(1, 100.0)),
            "8 of 9 rows; 1 worker reads 0 and writes 100 tokens/s; 1 s left",
        ),
        (
            Counts(9, answered=9, ended=9, completion_tokens=9, speed=Speed(1, 100.0)),
            "9 of 9 rows; 1 worker reads 0 and writes 100 tokens/s",
        ),
    ],
)
def test_what_is_not_known_is_left_out(
    counts: Counts, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LONGEST_SILENCE_S", 0.0)
    Lines().show(counts)
    assert capsys.readouterr().err == f"millstream: {line}\n"


def test_the_time_left_is_that_of_the_tokens_that_are_left() -> None:
    """Rows that could not be asked, and rows of an earlier process, foretell nothing; a worker more halves it."""
    counts = Counts(100, answered=60, failed=10, kept=50, ended=10, prompt_tokens=500, completion_tokens=500)
    assert counts.left_s is None  # nobody says how fast it is
    counts.speed = Speed(1, written_per_s=50.0, read_per_s=50.0)
    assert counts.left_s == 30.0
    counts.speed = Speed(2, written_per_s=100.0, read_per_s=100.0)
    assert counts.left_s == 15.0
    counts.total = 171
    assert counts.left_s is None  # too few came back
    assert Counts(9, answered=3, kept=3, speed=counts.speed).left_s is None


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = display(20, quiet=False)
    assert isinstance(bar, Bar)
    bar.show(Counts(20, answered=11, failed=1))
    bar.note("no worker [yet]")
    bar.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "12 of 20 rows, 1 failed" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", err)
    assert "no worker [yet]" in err


def test_quiet_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    silence = display(20, quiet=True)
    assert isinstance(silence, Silence)
    silence.show(Counts(20))
    silence.note("hello")
    silence.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "words"), [(59.4, "59 s"), (61, "1 min 01 s"), (3600, "1 h 00 min"), (86_399, "23 h 59 min")]
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert progress._duration(seconds) == words
