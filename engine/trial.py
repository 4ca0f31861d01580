"""What a job brings and could blow up runs in a process of its own, which takes nothing else with it.

    Trial.ask(question) --stdin, a line of JSON-->   a module run as a program, which calls `serve`
                        <-stdout, a line of JSON--   the answer

The process is bounded in memory and stack, each question in time: no thread of Python can be stopped from outside,
and an operation in C may hold all of them up. A question costs 0.2 ms beside its answer.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

START_SECONDS = 60.0
"""Most time for the process to import what it needs, on a machine however busy."""
MEMORY_BYTES = 2 << 30
_STACK_BYTES = 4 << 20
"""Half of what a thread has by default, so what passes here passes there."""


class Trial:
    """The process, started when first needed and again after it died. Safe on any thread."""

    def __init__(self, module: str) -> None:
        """
        Args:
            module: what to run, by its full name.
        """
        self._module = module
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Any, seconds: float) -> Any:
        """What the process says to it; None without an answer in so many seconds, or if it died of it."""
        with self._lock:
            process = self._running()
            answer = _ask(process, question, seconds)
            if answer is None:
                process.kill()
                process.wait()
                self._process = None
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            # -P: the folder we happen to be in is not where modules are looked for.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            weakref.finalize(self, _end, self._process)
            _read(self._process, START_SECONDS)
        return self._process


def _ask(process: subprocess.Popen[bytes], question: Any, seconds: float) -> Any:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    return _read(process, seconds)


def _read(process: subprocess.Popen[bytes], seconds: float) -> Any:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    line = process.stdout.readline() if ready else b""
    return json.loads(line) if line else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer questions until stdin ends. What takes more memory raises MemoryError, or ends the process."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_answer_all, args=(answer,))
    thread.start()
    thread.join()


def _answer_all(answer: Callable[[Any], Any]) -> None:
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
