"""The engine: requests, slots, KV, batches, sampling, text. No redis, no sockets.

`Engine` and `load_engine` are loaded when first asked for: importing this package imports no torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# OpenMP reads this when torch is loaded. Its threads spin at barriers by default, and whoever else needs a
# core then stalls them for whole time slices: on two cores shared with other processes a linear of 32 rows
# took 6 to 10 ms, with waiting threads 2 ms. On a quiet machine it makes no difference.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.loading import load_engine

__all__ = ["Engine", "load_engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    if name == "load_engine":
        from engine.loading import load_engine

        return load_engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
