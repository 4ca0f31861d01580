"""Lua scripts as typed calls: what goes in, what comes back, and how to run one or many.

A `Call` is a script with its arguments and the function that reads its reply. Nothing here talks to a server;
`queue.Queue` and `queue.AsyncQueue` do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Arg = str | bytes | int
SHARED = ("common", "unowned", "standing")
"""What stands in front of every script."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script's source and the SHA-1 under which the server caches it."""

    name: str
    source: str
    sha: str


@cache
def load(name: str) -> Script:
    """The script `lua/<name>.lua`, with the shared parts in front."""
    lua = resources.files("broker") / "lua"
    source = "".join((lua / f"{part}.lua").read_text() for part in (*SHARED, name))
    return Script(name, source, hashlib.sha1(source.encode()).hexdigest())


@cache
def sharded(script: Script) -> Script:
    """The script as a cluster's node runs it: what it publishes goes to the subscribers of the queue's own shard."""
    source = script.source.replace("redis.call('PUBLISH'", "redis.call('SPUBLISH'")
    return Script(script.name, source, hashlib.sha1(source.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One run of a script. It may run twice with the same outcome: every script is written so."""

    script: Script
    key: str
    """The declared key, which places the script on the queue's shard."""
    args: tuple[Arg, ...]
    read: Callable[[Any], T]

    def by_sha(self, on_cluster: bool = False) -> tuple[Arg, ...]:
        """The command that runs the cached script."""
        script = sharded(self.script) if on_cluster else self.script
        return ("EVALSHA", script.sha, 1, self.key, *self.args)

    def by_source(self, on_cluster: bool = False) -> tuple[Arg, ...]:
        """The command that runs the script and caches it."""
        script = sharded(self.script) if on_cluster else self.script
        return ("EVAL", script.source, 1, self.key, *self.args)
