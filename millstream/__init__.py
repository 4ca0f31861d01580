"""The face: `from millstream import Client, AsyncClient, Engine, SamplingParams`, each loaded when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import Engine as Engine
    from producer.async_client import AsyncClient as AsyncClient
    from producer.client import Client as Client
    from protocol import Job as Job
    from protocol import Message as Message
    from protocol import Result as Result
    from protocol import SamplingParams as SamplingParams

_HOMES = {
    "AsyncClient": "producer.async_client",
    "Client": "producer.client",
    "Engine": "engine",
    "Job": "protocol",
    "Message": "protocol",
    "Result": "protocol",
    "SamplingParams": "protocol",
}

__all__ = [
    "AsyncClient",
    "Client",
    "Engine",
    "Job",
    "Message",
    "Result",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # a tenth of what `--help` takes

        return version("millstream")
    if name not in _HOMES:
        raise AttributeError(f"module 'millstream' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
