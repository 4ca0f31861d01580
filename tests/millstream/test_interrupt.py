"""Ctrl-C ends the program, whatever waits on the way out."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

HANGS = """
import threading
import millstream.__main__ as program, millstream.verbs

def work(prog_name):
    lock = threading.Lock()
    lock.acquire()  # as an interrupt leaves it that falls between taking and holding it
    try:
        print("works", flush=True)
        threading.Event().wait()
    finally:
        lock.acquire()

millstream.verbs.build = lambda: work
program.main()
"""

LOSES_IT = """
import os, signal, threading
import millstream.__main__ as program, millstream.verbs

class Closed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass  # the interrupt is raised between two of these, and Python drops it

def work(prog_name):
    print("works", flush=True)
    closed = Closed()
    del closed
    threading.Event().wait()

millstream.verbs.build = lambda: work
program.main()
"""

TURNED = """
import os, signal
import millstream.__main__ as program, millstream.verbs

def work(prog_name):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise RuntimeError("as pydantic, interrupted while it builds a model") from None

millstream.verbs.build = lambda: work
program.main()
"""

AMONG_IMPORTS = """
import os, signal, sys
import millstream.__main__ as program

class Finder:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass

sys.meta_path.insert(0, Finder())
sys.argv = ["millstream", "status"]
program.main()
"""


@pytest.mark.parametrize(
    "code",
    [TURNED, *(AMONG_IMPORTS.format(name=name) for name in ("typer", "producer.cli.submit", "pydantic"))],
    ids=["turned into another error", "typer", "a verb", "pydantic"],
)
def test_an_interrupt_is_no_error_wherever_it_falls(code: str) -> None:
    program = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20)
    assert (program.returncode, program.stderr) == (130, b"")


def test_an_interrupt_that_a_destructor_swallows_is_made_good_and_not_told() -> None:
    program = subprocess.run([sys.executable, "-c", LOSES_IT], capture_output=True, timeout=20)
    assert (program.returncode, program.stdout, program.stderr) == (130, b"works\n", b"")


def test_a_lock_that_nobody_lets_go_does_not_keep_an_interrupted_program() -> None:
    program = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stdout.readline() == b"works\n"
    program.send_signal(signal.SIGINT)
    _, said = program.communicate(timeout=20)
    assert (program.returncode, said) == (130, b"")
