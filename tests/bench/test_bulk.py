"""The benchmark of bulk runs: a short run of it, its table, and what is no measurement."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bench import bulk


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
def test_a_short_run(workers: int) -> None:
    found = bulk.measure(2000, workers, window=200)  # 80 ms of the model process, of which ticks have 10 ms
    assert found["rows_per_s"] > 0
    assert found["us"]["command"] > 0
    assert all((found["us"][who] > 0) == (workers > 0) for who in ("worker", "model process"))
    assert found["growth"] < found["peak"]
    assert 0 < found["cores"] < 1.1
    assert len(bulk.tables({"workers": workers, "runs": [found]})["bulk"].splitlines()) == 5


def test_a_line_a_run() -> None:
    us = {"command": 60.4, "worker": 50.0, "model process": 40.0, "server": 100.0}
    run: dict[str, Any] = {"rows": 10_000, "rows_per_s": 5012.3, "us": us, "growth": 12_400_000}
    run |= {"cores": 0.628, "server": 9e6, "longest_stream": 2000}
    figures = {"machine": "2 CPUs", "workers": 2, "runs": [run]}
    table = bulk.tables(figures)["bulk"].splitlines()
    assert table[0] == "2 CPUs; 2 workers beside the run."
    assert table[-1] == "| 10,000 | 5,012 | 60 | 50 | 40 | 100 | 63% | 12 | 9 | 2,000 |"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (['{"id": 0, "prompt": "a", "completion": "a"}'], "1 of 2 rows"),
        ([], "0 of 2 rows"),
        (['{"id": 0, "prompt": "a", "completion": "b"}'], "row 0 of the output is another one's"),
        (['{"id": 1, "prompt": "a", "completion": "a"}'], "row 0 of the output is another one's"),
    ],
)
def test_a_row_that_is_lost_or_anothers_is_no_measurement(tmp_path: Path, lines: list[str], why: str) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(RuntimeError, match=why):
        bulk.check(output, 2)


def test_what_is_read_of_a_process() -> None:
    assert bulk.cpu_s(os.getpid()) > 0
    assert bulk.peak_bytes(os.getpid()) > 1 << 20
    assert bulk.peak_bytes(2**22) == 0  # no process has that number (proc(5), pid_max)
