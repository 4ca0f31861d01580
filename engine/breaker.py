"""What a step that the device could not compute means for those that follow.

    out of memory                        everybody waits again, half as many run, and half as many tokens a step
    the same with one of LEAST tokens    that request fails; the third in a row: the device is given up
    another fault of the device          as the first line; the second before so many steps went well: it is given up
    so many steps that went well         twice as many run, up to what was asked for

"So many" is 64 at first, and doubles with each fault that comes after the batch has grown: one that never fits is not
tried over and over, since each time everybody is computed again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import torch

from engine.interface import DeviceLost
from engine.pace import LEAST

logger = logging.getLogger(__name__)

FIRST_PATIENCE = 64
"""Steps."""
LONGEST_PATIENCE = 8192
FAILED_IN_A_ROW = 3
"""Requests that failed alone without a step that went well between them: it is not they who are too large."""

_MEMORY_WORDS = ("out of memory", "can't allocate memory", "alloc_failed", "not enough memory")
"""Torch has a class for a GPU's memory alone; a CPU's allocator, cuBLAS, cuDNN and oneDNN raise RuntimeError."""
_DEVICE_WORDS = ("cuda error", "hip error", "cublas_status", "cudnn_status")


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the device could not compute a step."""

    kind: Literal["memory", "device"]
    message: str
    """One line."""


def fault_of(error: Exception) -> Fault | None:
    """The device's fault in an error; None where the error is no such thing, but a fault of ours."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return Fault("memory", said)
    if isinstance(error, RuntimeError):
        lower = said.lower()
        if any(words in lower for words in _MEMORY_WORDS):
            return Fault("memory", said)
        if isinstance(error, torch.AcceleratorError) or any(words in lower for words in _DEVICE_WORDS):
            return Fault("device", said)
    return None


class Breaker:
    """Owns how many sequences may run and how many tokens a step may have, after what the device could not do."""

    def __init__(self, num_slots: int, max_num_batched_tokens: int) -> None:
        """
        Args:
            num_slots: sequences, as long as nothing goes wrong.
            max_num_batched_tokens: tokens a step, as long as nothing goes wrong.
        """
        self.sequences = self._most_sequences = num_slots
        self.tokens = self._most_tokens = max_num_batched_tokens
        self._patience = FIRST_PATIENCE
        self._went_well = 0
        """Steps since the last fault, or since the batch last grew."""
        self._has_grown = False
        """Since the last fault."""
        self._device_faults = 0
        self._failed_alone = 0

    def went_well(self) -> None:
        """A step was computed."""
        self._failed_alone = 0
        if not self._is_open:
            return
        self._went_well += 1
        if self._went_well < self._patience:
            return
        self._went_well = self._device_faults = 0
        self._has_grown = True
        self.sequences = min(self._most_sequences, 2 * self.sequences)
        self.tokens = min(self._most_tokens, 2 * self.tokens)
        logger.warning(
            "%d steps went well: %d sequences at once again, %d tokens a step",
            self._patience,
            self.sequences,
            self.tokens,
        )

    def failed(self, fault: Fault, num_sequences: int, num_tokens: int) -> bool:
        """A step was not computed.

        Args:
            fault: why.
            num_sequences: how many it was for.
            num_tokens: how many it had.

        Returns:
            Whether fewer are to be tried. If not, there cannot be fewer, and the one it was for is to fail.

        Raises:
            DeviceLost: it is of no use to go on here.
        """
        self._went_well = 0
        if self._has_grown:
            self._patience = min(LONGEST_PATIENCE, 2 * self._patience)
            self._has_grown = False
        self._device_faults += fault.kind == "device"
        is_alone = fault.kind == "memory" and num_sequences <= 1 and num_tokens <= LEAST
        self._failed_alone += is_alone
        if self._device_faults > 1 or self._failed_alone >= FAILED_IN_A_ROW:
            raise DeviceLost(fault.message)
        if is_alone:
            logger.warning(
                "the device could not compute one sequence of %d tokens: %s", num_tokens, fault.message
            )
            return False
        self.sequences = max(1, min(self.sequences, num_sequences) // 2)
        self.tokens = max(LEAST, min(self.tokens, num_tokens) // 2)
        logger.warning(
            "the device could not compute %d tokens of %d sequences: from now on %d tokens and %d sequences; %s",
            num_tokens,
            num_sequences,
            self.tokens,
            self.sequences,
            fault.message,
        )
        return True

    @property
    def _is_open(self) -> bool:
        """Whether less is done than was asked for, or a fault is remembered."""
        return (
            self.sequences < self._most_sequences
            or self.tokens < self._most_tokens
            or self._device_faults > 0
        )
