"""Ctrl-C ends the program, whatever waits on the way out."""

from __future__ import annotations

import signal
import subprocess
import sys

PROGRAM = """
import threading
import millstream.__main__ as program

def work(prog_name):
    lock = threading.Lock()
    lock.acquire()  # as an interrupt leaves it that falls between taking and holding it
    try:
        print("works", flush=True)
        threading.Event().wait()
    finally:
        lock.acquire()

program.build = lambda: work
program.main()
"""


def test_a_lock_that_nobody_lets_go_does_not_keep_an_interrupted_program() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None
    assert program.stdout.readline() == b"works\n"
    program.send_signal(signal.SIGINT)
    _, said = program.communicate(timeout=20)
    assert (program.returncode, said) == (130, b"")
