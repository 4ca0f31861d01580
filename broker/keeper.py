"""The process that owns an embedded server: starts it, counts who holds it, and stops it when nobody does.

    holder --.                                  a holder is any process with an open `EmbeddedBroker`;
    holder ---+--> hold socket -- keeper        the kernel closes its connection however the holder ends
    holder --'                      |
                                    +-- valkey-server   child; SIGTERM from the kernel when the keeper dies

    holder:  connect ........................... "bye" .... end of file: stopped
    keeper:  "loading" ... "ready" | "failed WHY"  "kept": others still hold it

The lock on the state folder arrives as an open file description (flock), taken by whoever launched the keeper and
inherited by the server: it lives as long as the server does, whatever happens to the others, so two servers never
write one append-only file. Only the standard library is imported, and `embedded` runs this file by its path: on
a busy two-core machine it starts in 0.1 s, where importing redis alone takes 0.5 s.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_FIRST_HOLD_S = 2.0
"""Who launched the keeper has this long to connect, however short the idle time."""
_STOP_S = 30.0
_ANSWER_S = 5.0
_LIBC = ctypes.CDLL(None)
_JEMALLOC = "libjemalloc.so.2"
_LOADER_CACHE = Path("/etc/ld.so.cache")
"""Names of the libraries that the dynamic loader finds (ldconfig(8)); read in 0.1 ms, where
`ctypes.util.find_library` starts programs."""


class Keeper:
    """One server and its holders. `listener` is bound already; `lock_fd` is handed on to the server."""

    def __init__(
        self, state_dir: Path, listener: socket.socket, socket_path: Path, lock_fd: int, idle_s: float
    ) -> None:
        self._state_dir = state_dir
        self._listener = listener
        self._socket_path = socket_path
        self._lock_fd = lock_fd
        self._idle_s = idle_s
        self._holders: set[socket.socket] = set()
        self._greeting = b"loading\n"
        self._stopping = False
        self._last_use = time.monotonic() + max(0.0, _FIRST_HOLD_S - idle_s)
        self._signals = _signals_as_bytes()
        self._selector = selectors.DefaultSelector()
        for source in (self._listener, self._signals):
            self._selector.register(source, selectors.EVENT_READ)

    def run(self, binary: str) -> None:
        """Start the server, keep it while it is used, stop it."""
        log_start = log_path(self._state_dir).stat().st_size
        preload = allocator(os.environ)
        try:
            server = self._launch(binary, preload)
            loaded = self._wait_until_loaded(server)
            if preload and not loaded and not self._stopping:
                _log(f"the server does not come up with {preload}: trying without")
                preload = ""
                server = self._launch(binary, preload)
                loaded = self._wait_until_loaded(server)
        except OSError as error:
            self._fail(f"cannot run {binary}: {error.strerror}")
            return
        if loaded:
            self._tell(b"ready\n")
            _log(f"server {server.pid} is ready, memory from {_loaded(server.pid, preload) or 'libc'}")
            self._keep(server)
        elif not self._stopping:
            self._fail(last_words(log_path(self._state_dir), log_start))
        self._stop(server)

    def _launch(self, binary: str, preload: str) -> subprocess.Popen[bytes]:
        keeper = os.getpid()

        def end_with_keeper() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != keeper:  # it died before the line above
                os._exit(1)

        self._socket_path.unlink(missing_ok=True)
        return subprocess.Popen(
            [binary, *server_options(self._state_dir, self._socket_path)],
            stdin=subprocess.DEVNULL,
            pass_fds=[self._lock_fd],
            preexec_fn=end_with_keeper,
            env={**os.environ, "LD_PRELOAD": preload} if preload else None,
        )

    def _wait_until_loaded(self, server: subprocess.Popen[bytes]) -> bool:
        """Whether the server came up. Holders hear "loading" every second, for as long as that takes."""
        told = time.monotonic()
        while server.poll() is None and not self._stopping:
            if self._ask(b"PING\r\n").startswith(b"+PONG"):
                return True
            if time.monotonic() - told > 1.0:
                self._tell(b"loading\n")
                told = time.monotonic()
            self._attend(0.005)
        return False

    def _keep(self, server: subprocess.Popen[bytes]) -> None:
        """Return when the last holder said bye, after `idle_s` without any client, or when the server is gone."""
        while server.poll() is None and not self._stopping:
            self._attend(None if self._holders else self._idle_s / 4)
            if not self._holders and time.monotonic() - self._last_use >= self._idle_s:
                if not self._has_clients():
                    _log(f"no client for {self._idle_s:g} s")
                    return
                self._last_use = time.monotonic()

    def _attend(self, timeout_s: float | None) -> None:
        """Wait for a holder to come or go, or for a signal, and see to it.

        Who comes as the last one leaves is not let in: the end of the listener tells it to look for another server.
        """
        for key, _ in self._selector.select(timeout_s):
            if self._stopping:
                return
            if key.fileobj is self._listener:
                self._admit()
            elif key.fileobj is self._signals:
                if signal.SIGTERM in self._signals.recv(64):
                    _log("told to stop")
                    self._stopping = True
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._release(key.fileobj)

    def _admit(self) -> None:
        holder, _ = self._listener.accept()
        self._selector.register(holder, selectors.EVENT_READ)
        self._holders.add(holder)
        self._tell(self._greeting, holder)

    def _release(self, holder: socket.socket) -> None:
        """A holder said bye, or its process ended: then the server waits `idle_s` for the next one."""
        try:
            said_bye = bool(holder.recv(16))
        except OSError:
            said_bye = False
        self._selector.unregister(holder)
        self._holders.remove(holder)
        self._last_use = time.monotonic()
        if said_bye and not self._holders:
            _log("the last client said bye")
            self._stopping = True
            self._holders.add(holder)  # it waits for the end of file, which comes when all is stopped
            return
        if said_bye:
            self._tell(b"kept\n", holder)
        holder.close()

    def _tell(self, line: bytes, *holders: socket.socket) -> None:
        """Send a line to those holders, by default to all; what is true for all is also the next one's greeting."""
        if not holders:
            self._greeting = line
        for holder in holders or self._holders:
            try:
                holder.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                continue  # it has gone: the selector will say so

    def _fail(self, why: str) -> None:
        _log(f"the server did not start: {why}")
        self._tell(f"failed {why}\n".encode())
        deadline = time.monotonic() + _FIRST_HOLD_S
        while not self._holders and time.monotonic() < deadline:  # whoever launched us shall hear it
            self._attend(0.1)

    def _has_clients(self) -> bool:
        """Whether anyone is connected to the server itself. One that is too busy to say is in use."""
        answer = self._ask(b"INFO clients\r\n")
        _, found, rest = answer.partition(b"connected_clients:")
        return not found or int(rest.split()[0]) > 1

    def _ask(self, command: bytes) -> bytes:
        """The server's answer to a command, as far as it comes at once; empty while it does not listen."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_S)
            try:
                connection.connect(str(self._socket_path))
                connection.sendall(command)
                return connection.recv(4096)
            except OSError:
                return b""

    def _stop(self, server: subprocess.Popen[bytes]) -> None:
        """Let nobody else in, end the server (SIGTERM: it writes out its append-only file), clear up."""
        Path(self._listener.getsockname()).unlink(missing_ok=True)
        self._listener.close()
        if server.poll() is not None:
            _log(f"server {server.pid} has ended with status {server.returncode}")
        else:
            server.terminate()
            try:
                server.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                _log(f"server {server.pid} does not stop; killing it")
                server.kill()
                server.wait()
        self._socket_path.unlink(missing_ok=True)
        _log("stopped")


def server_options(state_dir: Path, socket_path: Path) -> list[str]:
    """Valkey's command line: everything acknowledged is in the append-only file, nobody but this user can connect.

    The last three lines are for speed, CPU a job on the server: a job's hash in one piece of memory, payload and all,
    takes 12 % less than one piece a field; what nobody asks an embedded server, how long each command took, 4 %.
    """
    return [
        *("--port", "0", "--unixsocket", str(socket_path), "--unixsocketperm", "700"),
        *("--dir", str(state_dir), "--appendonly", "yes", "--appendfsync", "everysec"),
        *("--aof-load-truncated", "yes", "--save", "", "--maxmemory-policy", "noeviction"),
        *("--hash-max-listpack-value", "4096", "--latency-tracking", "no"),
        *("--commandlog-execution-slower-than", "-1", "--commandlog-request-larger-than", "-1"),
        *("--commandlog-reply-larger-than", "-1"),
    ]


def allocator(environ: Mapping[str, str], loader_cache: Path = _LOADER_CACHE) -> str:
    """The library that the dynamic loader shall put in front of the server's (LD_PRELOAD, ld.so(8)); empty: none.

    jemalloc where the system has it: Redis and Valkey are built with it by default, the wheel's server is not, and
    takes 22 to 28 % more CPU a row of a bulk run with libc's. `MILLSTREAM_BROKER_ALLOCATOR` names another library, or
    is `libc`; who has set LD_PRELOAD keeps that. What the loader does not find it leaves out, with a line in the log.
    """
    if "LD_PRELOAD" in environ:
        return ""
    if given := environ.get("MILLSTREAM_BROKER_ALLOCATOR"):
        return "" if given == "libc" else given
    try:
        return _JEMALLOC if f"{_JEMALLOC}\0".encode() in loader_cache.read_bytes() else ""
    except OSError:  # another system's loader
        return ""


def _loaded(pid: int, library: str) -> str:
    """The library, if that process has it; else empty."""
    name = os.path.basename(os.path.realpath(library)) if library else ""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has ended already
        return ""
    return library if name and name in maps else ""


def log_path(state_dir: Path) -> Path:
    """Where keeper and server write what happens."""
    return state_dir / "server.log"


def last_words(log: Path, start: int) -> str:
    """The last line of the log past byte `start`, without Valkey's process id and date."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").split("\n")
    words = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return words.partition(" # ")[2] or words


def _signals_as_bytes() -> socket.socket:
    """A socket on which SIGTERM and SIGCHLD arrive as one byte each, to be waited for beside the others."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    return ours


def _log(line: str) -> None:
    sys.stderr.write(f"{os.getpid()}:K {time.strftime('%d %b %Y %H:%M:%S')} * {line}\n")
    sys.stderr.flush()


def main(state_dir: str, hold_path: str, socket_path: str, binary: str, lock_fd: str, idle_s: str) -> None:
    """Listen, then go on in the background: once this returns to the launcher, it can connect."""
    os.umask(0o077)
    Path(hold_path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(hold_path)
    listener.listen(128)
    if os.fork():
        os._exit(0)
    Keeper(Path(state_dir), listener, Path(socket_path), int(lock_fd), float(idle_s)).run(binary)


if __name__ == "__main__":
    main(*sys.argv[1:])
