"""One queue on each real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker.connection import connect
from broker.keys import Keys
from broker.queue import Queue
from tests.broker.watchers import Watch, watchers
from tests.servers import RealServer


@pytest.fixture
def queue(server: RealServer) -> Iterator[Queue]:
    """An empty queue on a real server, of each kind in turn."""
    opened = Queue(connect(server.url), Keys())
    yield opened
    opened.close()


@pytest.fixture(params=["sync", "asyncio"])
def watch(request: pytest.FixtureRequest, server: RealServer) -> Iterator[Watch]:
    with watchers(server.url, request.param) as start:
        yield start
