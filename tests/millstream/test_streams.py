"""Streams that the caller closed or that cannot be written: a line at most, on the stream it belongs to."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from tests.servers import ValkeyServer

CLOSED = [closed for number in (1, 2, 3) for closed in itertools.combinations(("<&-", ">&-", "2>&-"), number)]


def run(server: ValkeyServer, command: str) -> subprocess.CompletedProcess[str]:
    """`millstream` with a shell's redirections behind it."""
    return subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m millstream {command}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={"REDIS_URL": server.url, "PATH": "/usr/bin:/bin"},
        timeout=60,
    )


@pytest.fixture(scope="module")
def server() -> ValkeyServer:
    with ValkeyServer(aof=False) as started:
        yield started


@pytest.mark.parametrize(
    "closed",
    [
        pytest.param(closed, id="".join(closed), marks=[] if len(closed) == 3 else pytest.mark.long)
        for closed in CLOSED
    ],
)
def test_a_stream_that_is_closed_changes_no_exit_code_and_gets_no_words(
    server: ValkeyServer, closed: tuple[str, ...]
) -> None:
    streams = " ".join(closed)
    for command, code in (("status", 0), ("result nosuch --json", 1), ("submit --id one -", 0)):
        done = run(server, f"{command} {streams}")
        assert done.returncode == code, done
        assert "Traceback" not in done.stderr
        assert not done.stdout or not done.stdout.startswith("millstream:")
        assert ("nosuch: not found" in done.stderr) == (code == 1 and "2>&-" not in closed)


@pytest.mark.parametrize(
    "closed", ["<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.long) for one in (">&-", "2>&-"))]
)
def test_a_worker_works_without_streams(server: ValkeyServer, closed: str) -> None:
    assert run(server, f"submit --id {len(closed)} text").returncode == 0
    done = run(server, f"worker --model dry-run:echo --burst {closed}")
    assert (done.returncode, done.stdout) == (0, "")
    assert run(server, f"result {len(closed)}").stdout == "text\n"


@pytest.mark.parametrize("command", ["--version", "--help", "status", "status --json", "queue limits"])
def test_a_full_disk_behind_stdout_is_said(server: ValkeyServer, command: str) -> None:
    done = run(server, f"{command} >/dev/full")
    assert done.returncode == 1
    assert done.stderr == "millstream: stdout could not be written: No space left on device\n"


def test_a_full_disk_behind_stderr_leaves_the_exit_code(server: ValkeyServer) -> None:
    for streams in ("2>/dev/full", ">/dev/full 2>/dev/full"):
        assert run(server, f"result nosuch {streams}").returncode == 1


def test_a_reader_that_has_gone_is_no_fault_to_tell(server: ValkeyServer) -> None:
    assert run(server, "status --json | true").stderr == ""
