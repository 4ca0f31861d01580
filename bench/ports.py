"""Ports for servers that are started for a while."""

from __future__ import annotations

import secrets
import socket

PORTS = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections (`ip_local_port_range`). One of these may be taken between the
look and the server's start, or while a server is down: then it cannot listen."""


def free_port() -> int:
    """A loopback port that nobody listens on; drawn, so that processes which ask at the same time differ.

    Raises:
        RuntimeError: a hundred ports in a row are taken.
    """
    for _ in range(100):
        port = PORTS[secrets.randbelow(len(PORTS))]
        with socket.socket() as probe:
            # As servers do: what a closed connection leaves behind on a port does not keep them from it.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port of {PORTS.start} to {PORTS.stop - 1} is free")
