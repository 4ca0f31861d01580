"""Fixtures of the producer's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import emptied
from tests.producer.program import Program
from tests.servers import RealServer, ValkeyServer


@pytest.fixture(scope="package")
def _one_server() -> Iterator[RealServer]:
    with ValkeyServer(aof=False) as server:
        yield server


@pytest.fixture
def url(_one_server: RealServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty server of one kind: what differs between kinds shows in the tests of broker and client."""
    with emptied(_one_server, request):
        yield _one_server.url


@pytest.fixture
def program(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """Runs a command line against that server."""
    return Program(url, monkeypatch, capsys)
