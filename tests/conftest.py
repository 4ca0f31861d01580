"""Fixtures that more than one room uses."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fakeredis
import pytest
import redis
from hypothesis import HealthCheck, settings

import engine  # noqa: F401  first: it says how OpenMP's threads wait, which torch reads when it is loaded
from tests.leaks import assert_nothing_leaked
from tests.models import save_tiny, smollm2_gguf, tiny_recipe
from tests.servers import KINDS, RealServer, require

# Tests send Ctrl-C to programs they start. What a script runs in the background (`make test &`, nohup) ignores that
# signal, and its children do: none of them would hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis lets an example fail that takes 200 ms, and a test whose examples are drawn slowly: what shares the
# machine decides that, not the code.
settings.register_profile("millstream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("millstream")


@pytest.fixture(scope="session")
def _session_servers() -> Iterator[dict[str, RealServer]]:
    """The servers that tests share, by kind; each is started when it is first asked for."""
    running: dict[str, RealServer] = {}
    yield running
    for server in running.values():
        server.close()


@pytest.fixture(params=list(KINDS))
def server(request: pytest.FixtureRequest, _session_servers: dict[str, RealServer]) -> Iterator[RealServer]:
    """A real server, empty, of each kind in turn. Shared with other tests: neither stop nor configure it."""
    shared = shared_server(request.param, _session_servers)
    with emptied(shared, request):
        yield shared


def shared_server(kind: str, servers: dict[str, RealServer]) -> RealServer:
    """The session's server of a kind."""
    if kind not in servers:
        servers[kind] = require(KINDS[kind])(aof=False).start()
    return servers[kind]


@contextmanager
def emptied(server: RealServer, request: pytest.FixtureRequest) -> Iterator[None]:
    """A server without a key for one test, which must leave none that nobody would ever delete."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield
        if "keys_broken_by_hand" not in request.fixturenames:
            assert_nothing_leaked(client)
        client.flushall()


@pytest.fixture
def keys_broken_by_hand() -> None:
    """Asked for by tests that put or take away keys themselves: the check for leaked keys is left out."""


@pytest.fixture(params=list(KINDS))
def fresh_server(request: pytest.FixtureRequest) -> Iterator[RealServer]:
    """A real server of each kind in turn, with an append-only file, for this test alone: kill it at will."""
    with require(KINDS[request.param])() as own:
        own.may_leak = "keys_broken_by_hand" in request.fixturenames
        yield own


@pytest.fixture
def fake_redis() -> Iterator[fakeredis.FakeRedis]:
    """An in-process imitation with Lua, for tests of pure logic: what a server must do is shown on real ones."""
    # Under RESP3 it hands scripts the reply of XREADGROUP in a form that no server does.
    with fakeredis.FakeRedis(server=fakeredis.FakeServer(version=(7,)), protocol=2) as client:
        yield client


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The `.gguf` file of SmolLM2-135M-Instruct; its converted copy stays in the user's cache."""
    return smollm2_gguf()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny random Llama of `fixtures/tiny_model.json`, a tokenizer of bytes and a chat template."""
    from transformers import LlamaForCausalLM

    return save_tiny(LlamaForCausalLM, tmp_path_factory.mktemp("tiny-llama"), tiny_recipe()["config"])
