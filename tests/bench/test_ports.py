"""Ports for servers of tests and benchmarks."""

from __future__ import annotations

import socket

import pytest

from bench import ports


def test_a_port_is_given_that_nobody_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
        with pytest.raises(RuntimeError, match=f"no port of {port} to {port} is free"):
            ports.free_port()
    assert ports.free_port() == port
