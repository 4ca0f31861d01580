"""The job that every queue of `bench.queue` runs: it answers with its prompt, and keeps count.

A module of its own, with nothing imported: rq finds a job by its module's name.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

PROMPT = "What is the least that a queue must do for a job? " * 4


@dataclass(slots=True)
class Tally:
    """What a worker process has run. It says so on stdout: a line at its first job, a line at the last."""

    expected: int = 0
    first: float = 0.0
    """When the first job ran, `time.time()`."""
    waits: list[float] = field(default_factory=list)
    """Seconds from submit to run, a job each."""

    def note(self, sent: float) -> None:
        """Count a job that was submitted at `sent`, `time.time()`."""
        now = time.time()
        self.waits.append(now - sent)
        if len(self.waits) == 1:
            self.first = now
            print("began", flush=True)
        if len(self.waits) == self.expected:
            print(json.dumps({"seconds": now - self.first, "waits": self.waits}), flush=True)


TALLY = Tally()


def answer(prompt: str, sent: float) -> str:
    """The job."""
    TALLY.note(sent)
    return prompt


async def answer_async(prompt: str, sent: float) -> str:
    """The job, for queues that run coroutines."""
    return answer(prompt, sent)


async def answer_arq(_context: object, prompt: str, sent: float) -> str:
    """The job as arq calls it."""
    return answer(prompt, sent)
