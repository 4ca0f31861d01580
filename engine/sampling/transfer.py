"""Between host and device, without waiting for what the device has still to do.

launch   rows, temperatures --> device         from pageable memory: staged before the call returns
         token ids --> pinned memory --> event
         (the next forward pass is launched)
read                              wait for the event: not for what was launched since, as `tolist` would
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch


def sent(values: Sequence[float] | npt.NDArray[Any], device: torch.device, dtype: Any = None) -> torch.Tensor:
    """Host values as a tensor on a device, in the order of what is launched there."""
    return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)


class Readback:
    """A tensor on its way to the host."""

    __slots__ = ("_event", "_host")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def tolist(self) -> list[Any]:
        """Its values, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        values: list[Any] = self._host.tolist()
        return values
