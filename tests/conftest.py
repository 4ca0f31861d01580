"""Fixtures that more than one room uses."""

from __future__ import annotations

from collections.abc import Iterator

import fakeredis
import pytest
import redis

from tests.servers import KINDS, RealServer, require


@pytest.fixture(scope="session")
def _session_servers() -> Iterator[dict[str, RealServer]]:
    """The servers that tests share, by kind; each is started when it is first asked for."""
    running: dict[str, RealServer] = {}
    yield running
    for server in running.values():
        server.close()


@pytest.fixture(params=list(KINDS))
def server(request: pytest.FixtureRequest, _session_servers: dict[str, RealServer]) -> RealServer:
    """A real server, empty, of each kind in turn. Shared with other tests: neither stop nor configure it."""
    kind: str = request.param
    if kind not in _session_servers:
        _session_servers[kind] = require(KINDS[kind])(aof=False).start()
    shared = _session_servers[kind]
    with redis.Redis.from_url(shared.url) as client:
        client.flushall()
    return shared


@pytest.fixture(params=list(KINDS))
def fresh_server(request: pytest.FixtureRequest) -> Iterator[RealServer]:
    """A real server of each kind in turn, with an append-only file, for this test alone: kill it at will."""
    with require(KINDS[request.param])() as own:
        yield own


@pytest.fixture
def fake_redis() -> Iterator[fakeredis.FakeRedis]:
    """An in-process imitation with Lua, for tests of pure logic: what a server must do is shown on real ones."""
    # Under RESP3 it hands scripts the reply of XREADGROUP in a form that no server does.
    with fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(7,)), protocol=2) as client:
        yield client
