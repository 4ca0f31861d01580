"""Fifty kills at random moments: of the run, its worker, its model process, its server, or of all at once."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import psutil
import pytest

from producer.bulk.generate import generate
from producer.bulk.interrupt import Interrupt
from protocol import MillstreamError
from tests.producer.bulk.orders import order, write_rows
from tests.producer.bulk.processes import ended, family, members, wait_for

KILLS = 50
LONGEST_WAIT_S = 1.0
RUN, ALL = "run", "all"
VICTIMS = (RUN, ALL, " worker ", "worker.child", "valkey-server")
ROWS = [{"custom_id": number, "prompt": f"row {number}", "x": number / 7} for number in range(2000)]
BAD = {"prompt": 3, "custom_id": "bad"}


class Runs:
    """Runs of the same input, one after the other, each in a forked process with a worker and a server of its own."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self._source = write_rows(folder / "in.jsonl", [*ROWS[:1000], BAD, *ROWS[1000:]])
        self._folder = folder
        self._done = 0
        self.child = 0

    @property
    def output(self) -> Path:
        """Of the run that is going on."""
        return self._folder / f"out-{self._done}.jsonl"

    def start(self) -> None:
        """Begin the run, or go on with it. The process needs no imports, so kills fall into the run itself."""
        self.child = os.fork()
        if self.child:
            return
        code = 2
        try:
            asked = order(self._source, self.output, "", model="dry-run:echo", redis_url=None)
            generate(asked, Interrupt())
            code = 0
        except MillstreamError as error:
            (self._folder / "why").write_text(str(error))
            code = 1
        finally:
            os._exit(code)

    def finished(self) -> tuple[bytes, bytes]:
        """Output and errors of a run that came to its end; the next one has an output of its own."""
        output, errors = self.output, self.output.with_suffix(".errors.jsonl")
        self._done += 1
        return output.read_bytes(), errors.read_bytes()

    def kill(self, victim: str) -> bool:
        """Kill it, or all; whether there was such a process."""
        killed = False
        if victim in (RUN, ALL):
            os.kill(self.child, signal.SIGKILL)
            killed = True
        for process, words in members(self.state):
            if victim == ALL or victim in words:
                try:
                    process.kill()
                    killed = True
                except psutil.NoSuchProcess:
                    continue
        return killed

    def why(self) -> str:
        """What the last run that stopped had to say."""
        return (self._folder / "why").read_text()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_anywhere_fifty_times_the_output_is_that_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(tmp_path)
    for name in list(os.environ):
        if name.endswith("REDIS_URL"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MILLSTREAM_STATE", str(runs.state))
    monkeypatch.setenv("MILLSTREAM_BROKER_IDLE_S", "2")
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
        elif code == 1:  # a worker that dies before its first answer, or again and again
            assert "the worker for dry-run:echo ended" in runs.why()
        else:
            assert code == -signal.SIGKILL
        runs.start()
    os.kill(runs.child, signal.SIGKILL)
    assert ended(runs.child, 20) is not None
    assert min(kills.values()) > 0
    assert wait_for(lambda: family(runs.state) == [], 30)
