"""What a long run takes of memory, here and on the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis

from tests.servers import ValkeyServer

ROWS = 100_000
WINDOW = 2000
MIB = 1 << 20


@contextmanager
def workers(program: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Two workers without a model; they end well."""
    command = [*program, "worker", "--model", "dry-run:echo"]
    started = [subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        yield
    finally:
        for worker in started:
            worker.terminate()
        assert [worker.wait(30) for worker in started] == [0, 0]


def write_batch_file(path: Path) -> None:
    with path.open("w") as file:
        for number in range(ROWS):
            body = {"model": "dry-run:echo", "prompt": f"row {number} " + "x" * 80, "max_tokens": 4}
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_hundred_thousand_rows_are_not_held_anywhere(tmp_path: Path) -> None:
    """F14 with a tenth of its rows and a quarter of its limits: 75 MB more here, 50 MB on the server, and there no
    more entries than the window has rows, and nothing at the end."""
    output = tmp_path / "out.jsonl"
    write_batch_file(tmp_path / "in.jsonl")
    program = [sys.executable, "-m", "millstream"]
    spool = tmp_path / "out.jsonl.run" / "spool"
    first = most = entries = server_bytes = 0
    with ValkeyServer() as server, redis.Redis.from_url(server.url) as client:
        environment = {**os.environ, "REDIS_URL": server.url}
        with workers(program, environment):
            command = [*program, "generate", tmp_path / "in.jsonl", "-o", output, "--quiet"]
            run = psutil.Popen([*command, "--window", str(WINDOW)], env=environment)
            while run.poll() is None:
                held = run.memory_info().rss
                if not first and spool.exists() and spool.stat().st_size:
                    first = held
                most = max(most, held)
                waiting = [client.xlen(key) for key in client.scan_iter(match="*:jobs:*", _type="stream")]
                entries = max([entries, *waiting])
                server_bytes = max(server_bytes, client.info("memory")["used_memory"])
                time.sleep(0.1)
        left = [
            key for key in client.scan_iter() if key.split(b":")[2] in (b"job", b"result", b"log", b"done")
        ]
    assert run.returncode == 0
    assert first
    assert (most - first) / MIB < 75
    assert 0 < entries <= WINDOW
    assert server_bytes / MIB < 50
    assert left == []
    with output.open() as file:
        names = [json.loads(line)["custom_id"] for line in file]
    assert names == [f"r{number}" for number in range(ROWS)]
