"""Processes that tests look at from outside."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def still_alive(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until they have ended; those that have not in time.

    `psutil.wait_procs` waits for orphans until their end has been collected too, which the first process of a
    container may do every two seconds only: a third of the worker tests' time went there.
    """
    end = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _lives(process)]) and time.monotonic() < end:
        time.sleep(0.01)
    return alive


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
