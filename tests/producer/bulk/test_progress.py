"""What a run shows while it goes on."""

from __future__ import annotations

import re

import pytest

from producer.bulk import progress
from producer.bulk.progress import Bar, Counts, Lines, Silence, display


def test_lines_for_logs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = display(2000, quiet=False)
    assert isinstance(lines, Lines)
    lines.show(Counts(2000, answered=10))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    lines.show(Counts(2000, answered=1000, failed=3, kept=503, ended=500, completion_tokens=9))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("millstream: 1,003 of 2,000 rows, 3 failed, ")
    assert "tokens/s, 0 s left" in err


@pytest.mark.parametrize("ended", [0, 1])
def test_time_left_is_told_once_a_row_has_come_back(
    ended: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that could not be asked, and rows of an earlier process, foretell nothing."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    counts = Counts(9, answered=3 + ended, failed=2, kept=3, ended=ended)
    Lines().show(counts)
    assert (" left" in capsys.readouterr().err) == bool(ended)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = display(9, quiet=False)
    bar.show(counts)
    bar.close()
    assert (" left" in capsys.readouterr().err) == bool(ended)
    assert counts.left_s(6.0) == (18.0 if ended else None)


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = display(20, quiet=False)
    assert isinstance(bar, Bar)
    bar.show(Counts(20, answered=11, failed=1))
    bar.note("no worker [yet]")
    bar.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "12/20 rows, 1 failed" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", err)
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
