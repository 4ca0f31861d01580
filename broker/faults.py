"""Which faults of a server pass by waiting, and what they are in a few words."""

from __future__ import annotations

import redis.exceptions as errors

PASSING = (
    errors.ConnectionError,
    errors.TimeoutError,
    errors.ReadOnlyError,
    errors.OutOfMemoryError,
    errors.ClusterDownError,
    errors.TryAgainError,
    errors.AskError,
    OSError,
)
"""It restarts, another takes its place, a slot moves, or it is full. A BusyLoadingError is a ConnectionError, a
MasterDownError a ClusterDownError, a MovedError an AskError."""
PASSING_WORDS = ("MISCONF ", "NOREPLICAS ", "BUSY ", "UNBLOCKED ")
"""As `PASSING`, where redis-py has no class: it cannot save, has too few replicas, runs a long script, or became a
replica while it kept us waiting."""


class ServerBusy(errors.ConnectionError):
    """A script runs long, and the server answers nobody until it is over: as while it loads its data."""


def passes(error: Exception) -> bool:
    """Whether waiting can mend it."""
    return isinstance(error, PASSING) or str(error).startswith(PASSING_WORDS)


def is_busy(said: object) -> bool:
    """Whether a reply, or what redis-py made of it in a pipeline, is that a script runs long."""
    return isinstance(said, errors.ResponseError) and (
        str(said).startswith("BUSY ") or " caused error: BUSY " in str(said)
    )


def is_refusal(error: BaseException) -> bool:
    """Whether the server answers and turns this user away: trying again at once is of no use."""
    refusals = (errors.AuthenticationError, errors.AuthorizationError)
    return isinstance(error, refusals) or isinstance(error.__cause__, refusals)


def in_words(error: BaseException) -> tuple[str, str]:
    """(what a passing fault is, what was said), a line each; the first is always the same for the same state."""
    while isinstance(error.__cause__, errors.RedisError):
        error = error.__cause__  # ours and redis-py's ConnectionErrors wrap what the server said
    said = (str(error).splitlines() or [type(error).__name__])[0]
    match error:
        case errors.BusyLoadingError():
            return "it loads its data", said
        case errors.OutOfMemoryError():
            return "its memory is full", said
        case errors.ReadOnlyError() | errors.MasterDownError():
            return "it is a replica now", said
        case errors.ClusterDownError():
            return "its cluster is down", said
        case errors.AskError() | errors.TryAgainError():
            return "the queue's slot is being moved", said
        case errors.AuthenticationError() | errors.AuthorizationError():
            return "it refuses the user name or password", said
        case errors.TimeoutError() | TimeoutError():
            return "it does not answer in time", said
        case errors.ConnectionError() | OSError():
            return "no connection", said
    return "it takes no calls", said
