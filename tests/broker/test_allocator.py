"""Which allocator the embedded server gets, and that no library keeps it from coming up."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import embedded, keeper
from broker.connection import connect
from broker.embedded import EmbeddedBroker, server_binary
from tests.servers import not_installed

IDLE_S = 0.3
JEMALLOC = "libjemalloc.so.2"


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ms-") as folder:
        yield Path(folder)


def _maps_and_log(root: Path) -> tuple[str, str]:
    """What a server that was started there has in memory, and what its log says once it has stopped."""
    state = root / "state"
    with (
        EmbeddedBroker(state, IDLE_S, runtime_dir=root / "run") as broker,
        connect(broker.url) as client,
    ):
        maps = Path(f"/proc/{client.info('server')['process_id']}/maps").read_text()
    return maps, (state / "server.log").read_text()


@pytest.mark.parametrize(
    ("environ", "installed", "chosen"),
    [
        ({}, True, JEMALLOC),
        ({}, False, ""),
        ({"MILLSTREAM_BROKER_ALLOCATOR": "libc"}, True, ""),
        ({"MILLSTREAM_BROKER_ALLOCATOR": ""}, True, JEMALLOC),
        ({"MILLSTREAM_BROKER_ALLOCATOR": "/opt/libmimalloc.so"}, False, "/opt/libmimalloc.so"),
        ({"LD_PRELOAD": "libmine.so"}, True, ""),
        ({"LD_PRELOAD": "", "MILLSTREAM_BROKER_ALLOCATOR": JEMALLOC}, True, ""),
    ],
)
def test_the_choice(tmp_path: Path, environ: dict[str, str], installed: bool, chosen: str) -> None:
    cache = tmp_path / "ld.so.cache"
    names = [b"libc.so.6", b"libjemalloc.so.20", JEMALLOC.encode() if installed else b"libz.so.1", b""]
    cache.write_bytes(b"glibc-ld.so.cache1.1" + b"\0".join(names))
    assert keeper.allocator(environ, cache) == chosen


def test_without_such_a_loader_there_is_no_choice(tmp_path: Path) -> None:
    assert keeper.allocator({}, tmp_path / "none") == ""


def test_jemalloc_where_the_system_has_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("MILLSTREAM_BROKER_ALLOCATOR", raising=False)
    if not keeper.allocator({}):
        not_installed(JEMALLOC)
    maps, log = _maps_and_log(root)
    assert JEMALLOC in maps
    assert f"memory from {JEMALLOC}" in log


def test_a_library_that_is_not_there_is_left_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("MILLSTREAM_BROKER_ALLOCATOR", "/nowhere/libfast.so")
    maps, log = _maps_and_log(root)
    assert "libfast" not in maps
    assert "memory from libc" in log
    assert "trying without" not in log


def test_a_server_that_a_library_breaks_is_started_without(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("MILLSTREAM_BROKER_ALLOCATOR", "libm.so.6")
    fragile = root / "valkey-server"
    fragile.write_text(f'#!/bin/sh\n[ -z "$LD_PRELOAD" ] || exit 7\nexec {server_binary()} "$@"\n')
    fragile.chmod(0o700)
    monkeypatch.setattr(embedded, "server_binary", lambda: fragile)
    _, log = _maps_and_log(root)
    assert log.count("the server does not come up with libm.so.6: trying without") == 1
    assert "memory from libc" in log
