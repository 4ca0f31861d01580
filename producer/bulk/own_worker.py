"""A worker for the time of a run: a process on a leash.

generate --- pipe, write end        the kernel closes it however generate ends,
   |                                and the worker, which reads the other end, stops
   '--- millstream worker --leash-fd N
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from producer.refusal import Refused
from protocol import MillstreamError

MOST_RESTARTS = 3
STOP_S = 20.0
USAGE = 2
"""Exit code of a worker that was told something it cannot do."""
RUNS_OWN = ("--model", "--queue", "--redis-url", "--lease", "--burst", "--leash-fd", "--help")
"""Flags of the worker that a run gives itself, or by which there would be no worker."""
ANSWERING = ("--dtype", "--kv-dtype", "--quantization", "--revision")
"""Flags of the worker that change answers, so that a run keeps to them."""


def read_flags(text: str) -> list[str]:
    """The flags for the worker, as a shell would read them.

    Raises:
        Refused: a quote is left open, or one is not for the user to set.
    """
    try:
        flags = shlex.split(text)
    except ValueError as error:
        raise Refused(f"--worker-flags {text}: {error}") from None
    for flag in flags:
        if flag.partition("=")[0] in RUNS_OWN:
            raise Refused(f"--worker-flags {text}: drop {flag}: a run starts its worker in its own way")
    return flags


def answering(flags: Sequence[str]) -> Mapping[str, str]:
    """Those that change answers, with their values."""
    found: dict[str, str] = {}
    for flag, behind in zip_longest(flags, flags[1:], fillvalue=""):
        name, is_joined, value = flag.partition("=")
        if name in ANSWERING:
            found[name] = value if is_joined else behind
    return found


class OwnWorker:
    """One worker process, once it is started; again if it dies after it has answered."""

    def __init__(self, model: str, flags: Sequence[str], queue: str, url: str, log: Path) -> None:
        self._command = [sys.executable, "-m", "millstream", "worker", "--model", model, "--queue", queue]
        # A short lease: nobody else waits for these jobs, and a worker that died is replaced at once.
        self._command += ["--redis-url", url, "--lease", "5"]
        self._flags = flags
        self._model = model
        self._log = log
        self._restarts = 0
        """In a row, without an answer between them."""
        self._answered = 0
        """Jobs that had ended when it was last started again."""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process."""
        end, self._leash = os.pipe()
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [*self._command, "--leash-fd", str(end), *self._flags],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[end],
                    start_new_session=True,  # Ctrl-C is for generate, which ends it in good order
                )
        finally:
            os.close(end)

    def check(self, *, answered: int) -> bool:
        """Whether it had died and was started again.

        Args:
            answered: jobs that have ended since the run began; only deaths without one between them count.

        Raises:
            Refused: it was told something that it cannot do.
            MillstreamError: it ended before it answered anything, or keeps dying; with its last words.
        """
        code = None if self._process is None else self._process.poll()
        if code is None:
            return False
        if answered > self._answered:
            self._restarts, self._answered = 0, answered
        if not answered and code == USAGE:
            raise Refused(f"the worker for {self._model} cannot be started so: {self._last_words(code)}")
        if not answered or self._restarts == MOST_RESTARTS:
            raise MillstreamError(
                f"the worker for {self._model} ended: {self._last_words(code)} (log: {self._log})"
            )
        self._restarts += 1
        os.close(self._leash)
        self.start()
        return True

    def stop(self) -> None:
        """Let go of the leash and wait until the worker is gone; its model process goes with it."""
        if self._process is None:
            return
        os.close(self._leash)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _last_words(self, code: int) -> str:
        if code < 0:
            return f"killed by signal {-code}"
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return (
            lines[-1].removeprefix("millstream: ").removeprefix("Error: ") if lines else f"exit code {code}"
        )
