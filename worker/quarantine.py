"""Jobs under suspicion: each runs once nothing else is held, with nobody beside it that it could take along.

Only what happens to a job while it is alone can convict it; its neighbours of earlier attempts may be here too.
"""

from __future__ import annotations

from collections import deque

from broker.calls import Lease
from engine.interface import DeviceLost
from protocol import ErrorCode, JobError
from worker.held import Held, Stop
from worker.model_process import ModelCrashed

ALONE_AFTER = 2
"""Crashes, or devices given up, that a job was at before it runs alone."""


def is_suspect(lease: Lease) -> bool:
    """Whether a job is to run alone: its process died twice, or this is its last try after errors that can pass."""
    was_retried = lease.retries >= ALONE_AFTER and lease.retries >= lease.max_retries
    return lease.crashes >= ALONE_AFTER or was_retried


class Quarantine:
    """Owns who waits to be alone, and who is."""

    def __init__(self) -> None:
        self.alone: Held | None = None
        self._waiting: deque[Held] = deque()

    def __bool__(self) -> bool:
        """Whether a suspect waits or runs: nothing may run beside it."""
        return bool(self._waiting) or self.alone is not None

    def __contains__(self, held: Held) -> bool:
        """Whether a job still waits to be alone."""
        return held in self._waiting

    def add(self, held: Held) -> None:
        """Have a job wait."""
        self._waiting.append(held)

    def forget(self, held: Held) -> None:
        """A job is held no more."""
        if held is self.alone:
            self.alone = None
        elif held in self._waiting:
            self._waiting.remove(held)

    def next(self, num_held: int) -> Held | None:
        """Who runs alone now: the first in line once nobody else of `num_held` is left."""
        if not self._waiting or num_held != len(self._waiting):
            return None
        self.alone = self._waiting.popleft()
        return self.alone

    def convicted(self, error: ModelCrashed | DeviceLost) -> tuple[Held, Stop] | None:
        """Who is to end, and how, since the process has ended; None: nobody was alone, or it may be tried again."""
        held = self.alone
        if held is None or not held.may_be_to_blame:
            return None
        if isinstance(error, ModelCrashed):
            times = held.lease.crashes + 1
            message = f"the process that ran it died {times} times, the last time with this job alone"
            return held, Stop("dead", JobError(code=ErrorCode.CRASHED_WORKER, message=message))
        if held.has_retries:
            return None
        message = f"the device could not compute it, the last time with this job alone: {error}"
        return held, Stop("failed", JobError(code=ErrorCode.DEVICE_ERROR, message=message))
