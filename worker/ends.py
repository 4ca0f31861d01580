"""A job's end as it goes to the server: last events, result, and what becomes of it."""

from __future__ import annotations

from broker.calls import Ending, News
from protocol import JobError, TerminalState, TerminalType
from worker.held import Held


def own_end(held: Held, model: str, worker: str) -> Ending:
    """The end that the model process has brought a job to."""
    return ending(held, "failed" if held.error is not None else "succeeded", held.error, model, worker)


def ending(held: Held, state: TerminalState, error: JobError | None, model: str, worker: str) -> Ending:
    """That end, with all that was made of the job; from now on nothing else is told of it."""
    kind: TerminalType = "done" if state == "succeeded" else "error" if state == "failed" else state
    result = held.result(state, model, worker, error)
    first, events = held.take_end(kind, error)
    dead_reason = error.code if error is not None and state == "dead" else ""
    return Ending(held.id, held.attempt, state, result, first, events, dead_reason)


def bytes_of(said: News | Ending) -> int:
    """What a script has in memory of it."""
    return sum(map(len, said.events)) + (len(said.result) if isinstance(said, Ending) else 0)
