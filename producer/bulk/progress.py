"""How far a run is, on stderr: a bar on a terminal, else a line every few seconds, or nothing."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Protocol

LINE_EVERY_S = 5.0


@dataclass(slots=True)
class Counts:
    """Where a run stands; its owner is the run."""

    total: int
    answered: int = 0
    failed: int = 0
    kept: int = 0
    """Of these, rows done by an earlier process of the run."""
    ended: int = 0
    """Rows whose job has ended in this process: what came back from the model."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Of the rows done by this process."""
    tokens_per_s: float = 0.0
    """What the queue's workers write now, by their heartbeats: rows that run count too."""

    @property
    def done(self) -> int:
        """Rows that have an outcome."""
        return self.answered + self.failed

    def left_s(self, elapsed_s: float) -> float | None:
        """Seconds to go, by what came back in the time that has passed; None while that says little."""
        rest = self.total - self.done
        # The first rows to end are the shortest, so what they foretell is far off.
        return rest * elapsed_s / self.ended if self.ended and self.ended * 10 >= rest else None


class Display(Protocol):
    """Shows counts and notes."""

    def show(self, counts: Counts) -> None:
        """Counts have changed; may be called as often as one likes."""

    def note(self, text: str) -> None:
        """Say something once."""

    def close(self) -> None:
        """Take the display off the screen."""


def display(total: int, *, quiet: bool) -> Display:
    """The display that fits stderr."""
    if quiet:
        return Silence()
    return Bar(total) if sys.stderr.isatty() else Lines()


class Silence:
    """Shows nothing."""

    def show(self, counts: Counts) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """A line every few seconds, for logs."""

    def __init__(self) -> None:
        self._began = self._said = time.monotonic()

    def show(self, counts: Counts) -> None:
        """Print a line, unless one was printed just now."""
        now = time.monotonic()
        if now - self._said >= LINE_EVERY_S:
            self._said = now
            self.note(
                f"{counts.done:,} of {counts.total:,} rows{_failed(counts)}, {_speed(counts, now - self._began)}"
            )

    def note(self, text: str) -> None:
        """Print a line."""
        print(f"millstream: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to take off."""


class Bar:
    """A bar on a terminal."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rows{task.fields[rest]}"),
            console=Console(stderr=True),
        )
        self._began = time.monotonic()
        self._task = self._bar.add_task("", total=total, rest="")
        self._bar.start()

    def show(self, counts: Counts) -> None:
        """Move the bar."""
        rest = f"{_failed(counts)}, {_speed(counts, time.monotonic() - self._began)}"
        self._bar.update(self._task, completed=counts.done, total=counts.total, rest=rest)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(f"millstream: {text}", markup=False, highlight=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.stop()


def _failed(counts: Counts) -> str:
    return f", {counts.failed:,} failed" if counts.failed else ""


def _speed(counts: Counts, elapsed_s: float) -> str:
    left_s = counts.left_s(elapsed_s)
    left = "" if left_s is None else f", {_duration(left_s)} left"
    return f"{counts.tokens_per_s:,.0f} tokens/s{left}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    )
