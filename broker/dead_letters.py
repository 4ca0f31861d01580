"""Dead letters as typed calls: jobs that were convicted, and entries of a stream that were no jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from broker.calls import DEFAULT_MAX_BYTES, DEFAULT_MAX_ENTRIES
from broker.keys import Keys
from broker.script import Call, load
from broker.submission import job_args
from protocol import Job, State


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job that was convicted, or an entry of a stream that was no job."""

    letter: str
    """Its own id; it begins with the server time (ms) at which it was written."""
    job_id: str
    """Empty for an entry that names no job."""
    reason: str
    attempt: int
    worker: str
    size: int
    """Bytes of `raw`."""
    raw: bytes | None = None
    """The job's payload, or the entry's fields as JSON; only where one letter was asked for."""
    history: tuple[dict[str, Any], ...] = ()
    """How earlier lives of the job ended; likewise."""


@dataclass(frozen=True, slots=True)
class Requeued:
    """What `dead_requeue` answered."""

    outcome: Literal["queued", "unknown", "alive", "full"]
    state: State | None = None
    """Of the job that has the id, where it is not dead."""


def dead_list(keys: Keys, count: int, after: str = "") -> Call[list[DeadLetter]]:
    """Up to `count` dead letters of those behind `after`, the oldest first; fewer where they are large."""
    args = (keys.base, after, count)
    return Call(load("dead_list"), keys.meta, args, lambda reply: [_letter(*row) for row in reply])


def dead_show(keys: Keys, name: str) -> Call[DeadLetter | None]:
    """The dead letter of that id, or of the job of that id; None without one."""
    return Call(
        load("dead_show"), keys.meta, (keys.base, name), lambda reply: _letter(*reply) if reply else None
    )


def dead_requeue(keys: Keys, letter: str, job: Job) -> Call[Requeued]:
    """Give the job of a dead letter another life."""

    def read(reply: list[Any]) -> Requeued:
        outcome: Any = _text(reply[0])
        state: Any = _text(reply[1]) if outcome == "alive" else None
        return Requeued(outcome, state)

    args = (keys.base, DEFAULT_MAX_ENTRIES, DEFAULT_MAX_BYTES, letter, *job_args(job))
    return Call(load("dead_requeue"), keys.meta, args, read)


def dead_purge(keys: Keys, names: Sequence[str] | None) -> Call[int]:
    """Delete dead letters, given by their ids or their jobs', None all of them; how many there were."""
    which = ("all",) if names is None else ("these", *names)
    return Call(load("dead_purge"), keys.meta, (keys.base, *which), int)


def _letter(
    letter: bytes,
    job_id: bytes,
    reason: bytes,
    attempt: int,
    worker: bytes,
    size: int,
    raw: bytes | None = None,
    history: bytes = b"",
) -> DeadLetter:
    lives = tuple(life for line in history.splitlines() if (life := _life(line)) is not None)
    return DeadLetter(_text(letter), _text(job_id), _text(reason), attempt, _text(worker), size, raw, lives)


def _life(line: bytes) -> dict[str, Any] | None:
    """How an earlier life ended; None where somebody wrote something else there."""
    try:
        life = json.loads(line)
    except ValueError:
        return None
    return life if isinstance(life, dict) else None


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
