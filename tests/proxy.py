"""A socket in front of a server on which replies can be lost or be late.

client ---- request ----> proxy ---- request ----> server
client <-- (cut off) ---- proxy <---- reply ------ server      it has run, and its caller does not know
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

CHUNK = 1 << 16


class Proxy:
    """Forwards connections to a server's unix socket; owns what goes wrong on the way."""

    def __init__(self, server: Path) -> None:
        self.path = server.with_name("proxy")
        self.delay_s = 0.0
        """How long each piece of a reply is held back."""
        self.request_delay_s = 0.0
        """How long each piece of a request is held back: a slow way, since the client's socket then fills up."""
        self.lost = 0
        """Replies that were lost so far."""
        self._server = server
        self._needle: bytes | None = None
        self._open: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX)

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def lose_reply_to(self, needle: bytes) -> None:
        """The next request that has these bytes runs, and the connection is cut in place of its reply."""
        self._needle = needle

    def lead_to(self, server: Path) -> None:
        """Connections made from now on go to that server's socket; open ones stay where they are."""
        self._server = server

    def __enter__(self) -> Self:
        self._listener.bind(str(self.path))
        self._listener.listen(512)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for end in [self._listener, *self._open]:
            _cut(end)
        self.path.unlink()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                try:
                    server.connect(str(self._server))
                except OSError:  # it is down
                    _cut(client)
                    continue
                self._open |= {client, server}
                doomed = threading.Event()
                for way in (self._requests, self._replies):
                    threading.Thread(target=way, args=(client, server, doomed), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, doomed: threading.Event) -> None:
        with suppress(OSError):
            while data := client.recv(CHUNK):
                if self._needle is not None and self._needle in data:
                    self._needle = None
                    doomed.set()
                if self.request_delay_s:
                    time.sleep(self.request_delay_s)
                server.sendall(data)
        self._close(client, server)

    def _replies(self, client: socket.socket, server: socket.socket, doomed: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(CHUNK):
                if doomed.is_set():
                    self.lost += 1
                    break
                if self.delay_s:
                    time.sleep(self.delay_s)  # in place of a network or a server that is busy
                client.sendall(data)
        self._close(client, server)

    def _close(self, *ends: socket.socket) -> None:
        for end in ends:
            self._open.discard(end)
            _cut(end)


def _cut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
