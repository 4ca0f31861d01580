"""Processes that tests of bulk runs start, kill and wait for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def ended(child: int, seconds: float) -> int | None:
    """The exit code, once there is one."""
    status: list[int] = []

    def reap() -> bool:
        pid, raw = os.waitpid(child, os.WNOHANG)
        status.extend([os.waitstatus_to_exitcode(raw)] if pid else [])
        return bool(pid)

    return status[0] if wait_for(reap, seconds) else None


def family(state: Path) -> list[str]:
    """What still runs of brokers and workers that belong to a state folder."""
    return [words for _, words in members(state)]


def members(state: Path) -> list[tuple[psutil.Process, str]]:
    """The same with their command lines."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        words = " ".join(process.info["cmdline"] or [])
        ours = str(state) in words or (process.info["environ"] or {}).get("MILLSTREAM_STATE") == str(state)
        if ours and process.status() != psutil.STATUS_ZOMBIE:
            found.append((process, words))
    return found


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
