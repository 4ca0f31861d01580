"""A worker, its producers and a bulk run on servers of which one takes the other's place."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from broker.keys import Keys
from producer.client import Client
from protocol import TokenEvent
from tests.servers import DebianRedisServer, ValkeyServer, require
from tests.setups import (
    SERVICE,
    Certificates,
    Sentinel,
    add_replica,
    cluster,
    cluster_node,
    home,
    pair,
    until,
)
from tests.worker.harness import Workers, logged, words

pytestmark = pytest.mark.long

ROWS = 300


def goes_on(url: str, folder: Path, take_over: Callable[[], None]) -> list[str]:
    """A watched job and a bulk run live through a failover; what the worker said of it: that the server is away, with
    the reason, and that it is back, two lines at least.
    """
    workers = Workers(url, folder)
    worker = workers.start("--lease", "5").ready()
    source, output = folder / "rows.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"row {number}"}) + "\n" for number in range(ROWS)))
    with Client(url) as client:
        job = client.submit(words(100), id="watched")
        texts: list[str] = []
        watching = threading.Thread(target=lambda: texts.extend(said(job)))
        watching.start()
        until(lambda: logged(client.queue, "watched") > 5, "it runs")
        command = [sys.executable, "-m", "millstream", "generate", str(source), "-o", str(output)]
        run = subprocess.Popen([*command, "--redis-url", url, "--window", "20"])
        until(lambda: _completions(client) > 0, "it goes on")
        take_over()
        assert run.wait(60.0) == 0
        watching.join(60.0)
        assert job.result(timeout=30.0).choices[0].text == words(100)
    assert "".join(texts) == words(100)
    rows = [json.loads(line)["completion"] for line in output.read_text().splitlines()]
    assert rows == [f"row {number}" for number in range(ROWS)]
    assert worker.process.poll() is None, worker.log
    lines = [line for line in worker.log.splitlines() if "redis is" in line]
    workers.close()
    return lines


def test_full_memory_for_a_while(tmp_path: Path) -> None:
    """Nobody gives up, nothing is lost: the producer waits for room, the worker for its writes."""

    def squeeze() -> None:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", 1)
            until(lambda: "its memory is full" in (tmp_path / "worker-0.log").read_text(), "the worker waits")
            client.config_set("maxmemory", 0)

    with ValkeyServer(aof=False) as server:
        lines = goes_on(server.url, tmp_path, squeeze)
    assert len(lines) == 2, lines


def _completions(client: Client) -> int:
    """How many times jobs have ended for a bulk run."""
    connection: Any = client.queue.client
    return sum(connection.xlen(key) for key in connection.scan_iter(client.queue.keys.done("*")))


def said(job: object) -> list[str]:
    assert hasattr(job, "stream")
    return [event.text for event in job.stream() if isinstance(event, TokenEvent)]


def test_sentinels_promote_the_replica(tmp_path: Path) -> None:
    kind = ValkeyServer
    with pair(kind) as (primary, _), Sentinel(kind, primary) as sentinel:
        until(sentinel.has_fit_replica, "somebody to promote")
        lines = goes_on(f"redis+sentinel://127.0.0.1:{sentinel.port}/{SERVICE}", tmp_path, primary.kill)
    assert 2 <= len(lines) <= 4, lines


def test_a_cluster_promotes_the_replica(tmp_path: Path) -> None:
    kind = require(DebianRedisServer)
    with cluster(kind, 3) as nodes, cluster_node(kind) as replica:
        at = home(nodes, Keys())
        add_replica(nodes, at, replica)
        seeds = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        lines = goes_on(f"redis+cluster://{seeds}", tmp_path, nodes[at].kill)
    assert 2 <= len(lines) <= 5, lines


def test_a_worker_behind_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    server = require(DebianRedisServer)(*certificates.server_options(), tcp=True)
    server.options += ["--tls-port", str(server.port), "--port", "0", "--appendfsync", "always"]
    path = certificates.path
    files = (
        f"ssl_ca_certs={path('ca.crt')}&ssl_certfile={path('client.crt')}&ssl_keyfile={path('client.key')}"
    )

    def restart() -> None:
        """A fast one would be over within redis-py's own retries."""
        server.kill()
        until(lambda: "redis is away" in (tmp_path / "worker-0.log").read_text(), "the worker waits")
        server.start()

    with server:
        url = f"{server.tcp_url.replace('redis://', 'rediss://')}?{files}"
        lines = goes_on(url, tmp_path, restart)
    assert len(lines) == 2, lines
