"""Model processes that ended in a row: when it is time to stop starting them.

finished job   end   end   finished job   end   end   end
                1     2        0           1     2     3: given up
"""

from __future__ import annotations

from engine.interface import DeviceLost
from protocol import MillstreamError
from worker.model_process import ModelCrashed

MOST_DEVICES = 3
"""Devices that fail one after the other are one device that fails."""
MOST_CRASHES = 10
"""A job that kills its process is convicted at the third; some such jobs may follow each other, but a machine on
which no job is ever finished would convict the whole queue."""


class ModelGivenUp(MillstreamError):
    """No model process lasts; the jobs were handed back."""


class Restarts:
    """Owns the counts of ends since a job was last finished."""

    def __init__(self) -> None:
        self._finished = 0
        self._crashes = 0
        self._devices = 0

    def note(self, error: ModelCrashed | DeviceLost, finished: int) -> str:
        """A model process has ended.

        Args:
            error: why.
            finished: jobs finished so far.

        Returns:
            How many that were, in words.
        """
        if finished > self._finished:
            self._finished = finished
            self._crashes = self._devices = 0
        if isinstance(error, DeviceLost):
            self._devices += 1
            return f"{self._devices} of {MOST_DEVICES}"
        self._crashes += 1
        return f"{self._crashes} of {MOST_CRASHES}"

    def check(self, error: ModelCrashed | DeviceLost) -> None:
        """Let another process be started.

        Raises:
            ModelGivenUp: there have been enough.
        """
        if self._devices >= MOST_DEVICES or self._crashes >= MOST_CRASHES:
            count = self._devices + self._crashes
            raise ModelGivenUp(
                f"{count} model processes ended in a row without a finished job, the last one by this: {error}. "
                "Its jobs were handed back; look at the device, or give the worker less to do at once "
                "(--max-num-seqs, --max-num-batched-tokens, --kv-memory)"
            )
