"""The benchmark of queues: a short run of it, and what is no measurement."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from bench import queue
from bench.results import NotMeasured
from broker.completions import Completion
from millstream import Client
from protocol import Choice, Job, Result


def test_a_short_run_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    decode = Result.decode
    monkeypatch.setattr(Result, "decode", lambda raw: (decoded.append(raw), decode(raw))[1])
    found = queue.measure_ours(jobs=300, rate=50, seconds=0.2)
    assert len(decoded) == 310, "each result once, as a user would"
    assert found["submit"] > 0
    assert found["drain"] > 0
    # The worker's time is the server's in whole milliseconds: it may be one less than the client's.
    assert -2 < found["p50"] <= found["p99"]
    assert 0 < found["result"]["p50"] <= found["result"]["p99"]
    assert found["p50"] < found["result"]["p50"] + 1
    table = queue.tables(
        {"jobs": 300, "peer_jobs": 1, "rate": 50, "queues": {"millstream": found, "arq": {"why": "no"}}}
    )["queue"]
    assert [line.split(" | ")[0] for line in table.splitlines()[4:]] == ["| millstream", "| arq"]


def test_a_peer_that_fails_is_no_measurement(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o700)
    with pytest.raises(NotMeasured, match="its process ended without figures"):
        queue.measure_peer("arq", str(python), 5, 5, 1)
    with pytest.raises(NotMeasured, match=r"cannot start .*: No such file"):
        queue.measure_peer("arq", str(tmp_path / "none"), 5, 5, 1)


def test_a_wrong_answer_is_no_measurement() -> None:
    result = Result(id="j", state="succeeded", choices=[Choice(text="another", token_ids=[0])])
    with pytest.raises(NotMeasured, match="job j came back without its answer"):
        queue._decoded(Completion("1-0", "j", result.encode()))


def test_what_fails_while_times_are_measured_is_no_measurement() -> None:
    """It is read in another thread, whose errors nobody hears by themselves."""

    class Failing:
        def take(self, _count: int, _note: Callable[[Result], None]) -> None:
            raise NotMeasured("no job came back")

    class Silent:
        def submit_many(self, _jobs: list[Job]) -> None: ...

    client, collector = cast(Client, Silent()), cast(queue.Collector, Failing())
    with pytest.raises(NotMeasured, match="no job came back"):
        asyncio.run(queue._steady(client, collector, rate=100, count=2))


def test_a_peer_is_one_that_there_is() -> None:
    assert queue._pythons(["arq=python"]) == {"arq": "python"}
    for wrong in ("arq", "celery=python"):
        with pytest.raises(SystemExit, match="write PEER=INTERPRETER"):
            queue._pythons([wrong])


def test_figures_by_nearest_rank() -> None:
    assert queue.summary([number / 1000 for number in range(1, 101)]) == {"p50": 50.5, "p99": 100.0}
    assert queue.summary([0.002]) == {"p50": 2.0, "p99": 2.0}


def test_what_the_benchmark_needs_of_ours_is_nothing_for_peers() -> None:
    """Peers' interpreters have none of our packages."""
    code = (
        "import sys, bench.queue_peers\n"
        "print({name.partition('.')[0] for name in sys.modules} - {'bench', '__main__'} - sys.stdlib_module_names)"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=queue.ROOT, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "set()"), done.stderr
