"""What a job brings and could blow up runs in a process of its own, which takes nothing else with it.

    Trial.ask(question) --stdin, a line of JSON-->   a module run as a program, which calls `serve`
                        <-stdout, a line of JSON--   the answer

The process is bounded in memory and stack, each question in processor time: no thread of Python can be stopped from
outside, and an operation in C may hold all of them up. The bound holds within the process itself, so it ends even
where nobody is left to end it, and a machine that stands still takes nothing from a question's time. A question costs
0.2 ms beside its answer.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

SILENT_SECONDS = 60.0
"""Most time for the process to import what it needs, or to answer, on a machine however busy."""
MEMORY_BYTES = 2 << 30
"""Address space that a question may take, beside what the process has before the first one."""
_STACK_BYTES = 4 << 20
"""Half of what a thread has by default, so what passes here passes there."""
_FROM_OUTSIDE = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGHUP))
"""Signals that no question brings about: somebody else's, or ours to a silent process."""
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""OpenBLAS comes with numpy and takes 41 MB of address space a thread when it is loaded; nothing here uses it."""


class TrialFailed(Exception):
    """No process, or one that fell silent or was ended by somebody: not the question's fault, and it may pass."""


class Trial:
    """The process, started when first needed and again after it ended. Safe on any thread."""

    def __init__(self, module: str) -> None:
        """
        Args:
            module: what to run, by its full name.
        """
        self._module = module
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Any, seconds: float) -> Any:
        """What the process says to it.

        Args:
            seconds: of processor time that the answer may take.

        Returns:
            The answer, never None; None where it takes more time or memory, or breaks the process.

        Raises:
            TrialFailed: see there.
        """
        with self._lock:
            # It is kept once it has answered: an answer that nobody took would be the next question's.
            process, self._process = self._running(), None
            answer = _answer_of(process, [seconds, question])
            if answer is None:
                _check_fault(process)
            else:
                self._process = process
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        try:
            # -P: the folder we happen to be in is not where modules are looked for.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | _ONE_THREAD,
            )
        except OSError as error:
            raise TrialFailed(f"the process of {self._module} cannot be started: {error}") from error
        weakref.finalize(self, _end, process)
        if _read(process) != "ready":
            raise TrialFailed(f"the process of {self._module} did not start: {_how_it_ended(_end(process))}")
        return process


def _answer_of(process: subprocess.Popen[bytes], question: Any) -> Any:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    return _read(process)


def _read(process: subprocess.Popen[bytes]) -> Any:
    """What the next line says; None where none comes in time, or half of one."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], SILENT_SECONDS)
    line = process.stdout.readline() if ready else b""
    return json.loads(line) if line.endswith(b"\n") else None


def _check_fault(process: subprocess.Popen[bytes]) -> None:
    """Look how a process ended, or end it, where it gave no answer.

    Raises:
        TrialFailed: that was not the question's doing.
    """
    code = _end(process)
    if -code in _FROM_OUTSIDE:
        raise TrialFailed(f"the process that tries it gave no answer: {_how_it_ended(code)}")


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return f"it said nothing for {SILENT_SECONDS:.0f} s, or was killed"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> int:
    """Kill it if it runs; its exit code."""
    process.kill()
    return process.wait()


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer questions until stdin ends. One that takes more time ends the process; one that takes more memory raises
    MemoryError, or ends it too.
    """
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal reaches the parent, which decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    most, (_, hard) = _address_space() + MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_answer_all, args=(answer,))
    thread.start()
    thread.join()


def _address_space() -> int:
    """Bytes that this process has."""
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _answer_all(answer: Callable[[Any], Any]) -> None:
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        seconds, question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor's time, all threads together
        told = json.dumps(answer(question))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(told, flush=True)
