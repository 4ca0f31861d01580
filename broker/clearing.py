"""Cancel what waits in a queue, slice by slice: a script holds the server up while it runs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from broker.keys import Keys
from broker.script import Call, load
from protocol import Priority

FROM_THE_START = "0"
DELAYED = "delayed"
"""The place of jobs that wait for their time, which come from there into streams."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """What came of clearing a queue, or a slice of it."""

    cancelled: int
    """Jobs that have ended so."""
    cancelling: int
    """Jobs that run and were marked: their workers end them."""


@dataclass(frozen=True, slots=True)
class What:
    """Which jobs are meant."""

    priority: Priority | None = None
    tenant: str | None = None
    running: bool = False
    """Also those that run."""


def clearing(keys: Keys, what: What) -> Generator[Call[Any], Any, Cleared]:
    """The calls that clear a queue, each to be run and its reply sent in; returns how many jobs were cancelled.

    Jobs that come meanwhile may be cancelled too. Places are listed again behind `delayed`: a job whose time comes
    before its slice does may lie in one that was none before.
    """
    cancelled = cancelling = 0
    left, seen = list((yield places(keys, what))), set[str]()
    while left:
        place = left.pop(0)
        seen.add(place)
        cursor = FROM_THE_START
        while cursor:
            cleared, cursor = yield clear(keys, what, place, cursor)
            cancelled += cleared.cancelled
            cancelling += cleared.cancelling
        if place == DELAYED:
            left = [place for place in (yield places(keys, what)) if place not in seen]
    return Cleared(cancelled, cancelling)


def clear_all(run: Callable[[Call[Any]], Any], keys: Keys, what: What) -> Cleared:
    """Clear a queue by a function that runs a call and returns its reply."""
    steps = clearing(keys, what)
    reply: Any = None
    while True:
        try:
            call = steps.send(reply)
        except StopIteration as through:
            cleared: Cleared = through.value
            return cleared
        reply = run(call)


def places(keys: Keys, what: What) -> Call[list[str]]:
    """Where such jobs may be."""
    return Call(
        load("clear"),
        keys.meta,
        _args(keys, what, "", FROM_THE_START),
        lambda reply: [place.decode() for place in reply],
    )


def clear(keys: Keys, what: What, place: str, cursor: str) -> Call[tuple[Cleared, str]]:
    """Cancel a slice of a place's jobs; also the cursor to go on with, empty at the place's end."""

    def read(reply: list[Any]) -> tuple[Cleared, str]:
        return Cleared(*reply[:2]), reply[2].decode()

    return Call(load("clear"), keys.meta, _args(keys, what, place, cursor), read)


def _args(keys: Keys, what: What, place: str, cursor: str) -> tuple[str | int, ...]:
    return keys.base, what.priority or "", what.tenant or "", int(what.running), place, cursor
