"""A queue on a real server, and workers on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.queue import Queue
from tests.conftest import emptied
from tests.servers import RealServer, ValkeyServer
from tests.worker.harness import Workers, queue_at


@pytest.fixture(scope="session")
def _valkey() -> Iterator[RealServer]:
    with ValkeyServer(aof=False) as running:
        yield running


@pytest.fixture
def queue(_valkey: RealServer, request: pytest.FixtureRequest) -> Iterator[Queue]:
    """An empty queue. The scripts are shown on both kinds of server in tests/broker; here one will do."""
    with emptied(_valkey, request), queue_at(_valkey.url) as queue:
        yield queue


@pytest.fixture
def workers(_valkey: RealServer, queue: Queue, tmp_path: Path) -> Iterator[Workers]:  # noqa: ARG001
    """Workers on that queue."""
    started = Workers(_valkey.url, tmp_path)
    yield started
    started.close()
