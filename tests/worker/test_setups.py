"""A worker, its producers and a bulk run on servers of which one takes the other's place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.keys import Keys
from producer.client import Client
from protocol import TokenEvent
from tests.producer.bulk.orders import order, read_rows, write_rows
from tests.servers import KINDS, RealServer, require
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

ROWS = 200


def goes_on(url: str, folder: Path, take_over: Callable[[], None]) -> list[str]:
    """A watched job and a bulk run live through a failover; what the worker said of it."""
    from producer.bulk.generate import generate
    from producer.bulk.interrupt import Interrupt

    workers = Workers(url, folder)
    worker = workers.start("--lease", "5").ready()
    source = write_rows(folder / "rows.jsonl", ({"prompt": f"row {number}"} for number in range(ROWS)))
    with Client(url) as client:
        job = client.submit(words(100), id="watched")
        texts: list[str] = []
        watching = threading.Thread(target=lambda: texts.extend(said(job)))
        watching.start()
        until(lambda: logged(client.queue, "watched") > 5, "it runs")
        run = order(source, folder / "out.jsonl", url, window=20, patience_s=60.0)
        running = threading.Thread(target=generate, args=(run, Interrupt()))
        running.start()
        until(lambda: (folder / "out.jsonl").exists() or logged(client.queue, "watched") > 20, "it goes on")
        take_over()
        running.join(60.0)
        watching.join(60.0)
        assert job.result(timeout=30.0).choices[0].text == words(100)
    assert "".join(texts) == words(100)
    assert [row["completion"] for row in read_rows(folder / "out.jsonl")] == [f"row {n}" for n in range(ROWS)]
    assert worker.process.poll() is None, worker.log
    lines = [line for line in worker.log.splitlines() if "redis is" in line]
    workers.close()
    return lines


def said(job: object) -> list[str]:
    assert hasattr(job, "stream")
    return [event.text for event in job.stream() if isinstance(event, TokenEvent)]


@pytest.mark.parametrize("kind", KINDS.values())
def test_sentinels_promote_the_replica(kind: type[RealServer], tmp_path: Path) -> None:
    with pair(require(kind)) as (primary, _), Sentinel(kind, primary) as sentinel:
        until(sentinel.has_fit_replica, "somebody to promote")
        lines = goes_on(f"redis+sentinel://127.0.0.1:{sentinel.port}/{SERVICE}", tmp_path, primary.kill)
    assert len(lines) <= 4, lines


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_cluster_promotes_the_replica(kind: type[RealServer], tmp_path: Path) -> None:
    with cluster(require(kind), 3) as nodes, cluster_node(kind) as replica:
        at = home(nodes, Keys())
        add_replica(nodes, at, replica)
        seeds = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        lines = goes_on(f"redis+cluster://{seeds}", tmp_path, nodes[at].kill)
    assert len(lines) <= 5, lines


def test_a_worker_behind_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    server = require(KINDS["redis"])(*certificates.server_options(), tcp=True)
    server.options += ["--tls-port", str(server.port), "--port", "0", "--appendfsync", "always"]
    path = certificates.path
    files = (
        f"ssl_ca_certs={path('ca.crt')}&ssl_certfile={path('client.crt')}&ssl_keyfile={path('client.key')}"
    )
    with server:
        url = f"{server.tcp_url.replace('redis://', 'rediss://')}?{files}"
        lines = goes_on(url, tmp_path, server.restart)
    assert len(lines) <= 2, lines
