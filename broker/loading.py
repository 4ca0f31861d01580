"""Workers that load their first model: a large one takes minutes, in which nobody else would know that it comes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from broker.keys import Keys
from broker.script import Call, load


@dataclass(frozen=True, slots=True)
class Loading:
    """A worker that will serve the queue once its model is loaded."""

    worker: str
    model: str
    """As the worker was told it."""
    since_ms: int
    """For how long it has been loading."""


def note_loading(keys: Keys, worker: str, model: str) -> Call[None]:
    """Say that a worker loads a model; to be said again and again until it registers."""
    return Call(load("loading"), keys.meta, (keys.base, worker, model), lambda _: None)


def leave(keys: Keys, worker: str) -> Call[None]:
    """Say that a worker has ended, whether it served or had still to load its model."""
    return Call(load("leave"), keys.meta, (keys.base, worker), lambda _: None)


def read_loading(
    told: Sequence[bytes], now: int, recent_ms: int, beating: Collection[str]
) -> tuple[Loading, ...]:
    """Who loads.

    Args:
        told: worker and what it last said, in turns.
        now: server time, ms.
        recent_ms: whoever has said nothing for longer is gone.
        beating: workers that have registered. What one said before may reach the server after that.
    """
    found = []
    for worker, said in zip(told[::2], told[1::2], strict=True):
        with suppress(ValueError):  # somebody spoilt it: its worker says it again
            at, since, model = said.decode().split(" ", 2)
            if now - int(at) <= recent_ms and worker.decode() not in beating:
                found.append(Loading(worker.decode(), model, now - int(since)))
    return tuple(found)
