"""A queue on a real server, and workers on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.queue import Queue
from tests.conftest import emptied, shared_server
from tests.servers import RealServer, ValkeyServer
from tests.worker.harness import Workers, queue_at

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """More time for whoever waits for processes, several times in a test: `harness.DEADLINE_S` each time."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture
def server_kind() -> str:
    """The kind of server under the queue. The scripts are shown on both in tests/broker, so here one will do; tests
    of known trouble name both (`tests.worker.harness.ON_BOTH_SERVERS`).
    """
    return ValkeyServer.kind


@pytest.fixture
def _server(server_kind: str, _session_servers: dict[str, RealServer]) -> RealServer:
    return shared_server(server_kind, _session_servers)


@pytest.fixture
def queue(_server: RealServer, request: pytest.FixtureRequest) -> Iterator[Queue]:
    """An empty queue."""
    with emptied(_server, request), queue_at(_server.url) as queue:
        yield queue


@pytest.fixture
def workers(_server: RealServer, queue: Queue, tmp_path: Path) -> Iterator[Workers]:  # noqa: ARG001
    """Workers on that queue."""
    started = Workers(_server.url, tmp_path)
    yield started
    started.close()
