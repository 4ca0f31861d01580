"""How far a run is, on stderr: a bar on a terminal, else a line now and then, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from broker.calls import WorkerBeat

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_EVERY_S = 10.0
"""Lines of a log are no closer than that."""
LINE_EVERY_SHARE = 0.05
"""Of the rows: a line is due when so many more are done."""
LONGEST_SILENCE_S = 60.0
"""A line is due after this whatever is done."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What the queue's workers do, by their heartbeats; jobs of others on the same queue count too."""

    workers: int = 0
    written_per_s: float = 0.0
    """Tokens."""
    read_per_s: float = 0.0
    """Tokens of prompts, those that came out of the cache too."""
    cached: float = 0.0
    """Share of these."""

    @classmethod
    def of(cls, beats: Sequence[WorkerBeat]) -> Speed:
        """All living workers together."""
        alive = [beat.info for beat in beats if beat.alive]
        lately = [info.get("lately", {}) for info in alive]
        read = sum(told.get("read_per_s", 0.0) for told in lately)
        cached = sum(told.get("read_per_s", 0.0) * told.get("cached", 0.0) for told in lately)
        written = sum(told.get("tokens_per_s", 0.0) for told in lately)
        return cls(len(alive), written, read, cached / read if read else 0.0)


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
    speed: Speed = Speed()

    @property
    def done(self) -> int:
        """Rows that have an outcome."""
        return self.answered + self.failed

    @property
    def left_s(self) -> float | None:
        """Seconds to go: the tokens of the rows that are left, were they like those that came back, at the workers'
        speed. None while that says little, and once there are none.

        Rows a second would say less: most end in bursts, and a worker that is added shows in the tokens at once.
        """
        rest = self.total - self.done
        a_second = self.speed.read_per_s + self.speed.written_per_s
        # The first rows to end are the shortest, so what they foretell is far off.
        if not rest or not a_second or not self.ended or self.ended * 10 < rest:
            return None
        return rest * (self.prompt_tokens + self.completion_tokens) / self.ended / a_second


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
    """A line now and then, for logs."""

    def __init__(self) -> None:
        self._said = time.monotonic()
        self._done = 0

    def show(self, counts: Counts) -> None:
        """Print a line, if one is due."""
        now = time.monotonic()
        silent_s, more = now - self._said, counts.done - self._done
        if silent_s >= LONGEST_SILENCE_S or (
            silent_s >= LINE_EVERY_S and more >= LINE_EVERY_SHARE * counts.total
        ):
            self._said, self._done = now, counts.done
            self.note(_line(counts))

    def note(self, text: str) -> None:
        """Print a line."""
        print(f"millstream: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to take off."""


class Bar:
    """A bar on a terminal, and under it what the lines of a log would say."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self._counts = Counts(total)
        self._live = Live(get_renderable=self._picture, console=Console(stderr=True), refresh_per_second=4)
        self._live.start()

    def show(self, counts: Counts) -> None:
        """Move the bar, the next time it is drawn."""
        self._counts = counts

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._live.console.print(f"millstream: {text}", markup=False, highlight=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._live.stop()

    def _picture(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        picture = Table.grid()
        picture.add_row(ProgressBar(max(self._counts.total, 1), self._counts.done, width=60))
        picture.add_row(Text(_line(self._counts)))
        return picture


def _line(counts: Counts) -> str:
    """Where a run stands: `12 of 20 rows, 1 failed; 2 workers read 900 and write 300 tokens/s, 43% of prompts cached;
    5 s left`. What is not known yet is left out."""
    failed = f", {counts.failed:,} failed" if counts.failed else ""
    parts = [f"{counts.done:,} of {counts.total:,} rows{failed}"]
    if counts.speed.workers:
        parts.append(_workers(counts.speed))
    if counts.left_s is not None:
        parts.append(f"{_duration(max(1.0, counts.left_s))} left")
    return "; ".join(parts)


def _workers(speed: Speed) -> str:
    one = speed.workers == 1
    workers = "1 worker" if one else f"{speed.workers:,} workers"
    if not speed.read_per_s and not speed.written_per_s:
        return workers
    read, write = ("reads", "writes") if one else ("read", "write")
    cached = f", {speed.cached:.0%} of prompts cached" if speed.cached else ""
    return f"{workers} {read} {speed.read_per_s:,.0f} and {write} {speed.written_per_s:,.0f} tokens/s{cached}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    )
