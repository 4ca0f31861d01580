"""The engine: requests, slots, KV, batches, sampling, text. No redis, no sockets.

`Engine` and `load_engine` are loaded when first asked for: importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
