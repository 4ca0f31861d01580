"""A disk that takes no more, wherever a run is: one line, and the same command goes on once there is room."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.producer.bulk.orders import read_rows, write_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program


@contextmanager
def most_bytes_of_a_file(limit: int) -> Iterator[None]:
    """No file of this process grows beyond that: writes fail as on a full disk, with EFBIG for ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "format",
    [
        "jsonl",
        pytest.param("openai", marks=pytest.mark.long),
        pytest.param("parquet", marks=pytest.mark.long),
    ],
)
def test_wherever_the_disk_is_full_nothing_is_lost_and_nothing_done_twice(
    program: Program, url: str, tmp_path: Path, format: str
) -> None:
    rows = [{"custom_id": f"k{number}", "prompt": f"p{number}"} for number in range(60)]
    source = write_rows(tmp_path / "in.jsonl", [*rows, {"custom_id": "bad", "prompt": 3}])
    output = tmp_path / "out.jsonl"
    command = ("generate", source, "-o", output, "--window", "20", "--format", format)
    failed = 0
    with FakeWorker(url) as worker:
        for limit in [0, 1, 100, 700, 1200, 2000, 4000, 6000, 9000, 12_000, 20_000, 1 << 20]:
            with most_bytes_of_a_file(limit):
                done = program(*command)
            if done.returncode == 3:
                break
            failed += 1
            assert (done.returncode, "Traceback" in done.stderr) in [(1, False), (2, False)], done.stderr
            assert "File too large" in done.stderr.splitlines()[-1]
            assert not output.exists()
        assert failed >= 5
        assert len(worker.answered) == len(set(worker.answered)) == 60
    if format == "jsonl":
        assert [row["completion"] for row in read_rows(output)] == [f"p{number}" for number in range(60)]
    assert "nothing to do" in program(*command).stderr


def test_standard_input_that_the_disk_does_not_hold_ends_the_run(program: Program, tmp_path: Path) -> None:
    with most_bytes_of_a_file(3000):
        done = program("generate", "-", "-o", tmp_path / "out.jsonl", stdin='{"prompt": "a"}\n' * 1000)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "File too large" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()
