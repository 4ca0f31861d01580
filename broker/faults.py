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


def passes(error: Exception) -> bool:
    """Whether waiting can mend it."""
    return isinstance(error, PASSING) or str(error).startswith(PASSING_WORDS)


def is_refusal(error: BaseException) -> bool:
    """Whether the server answers and turns this user away: trying again at once is of no use."""
    return isinstance(error, errors.AuthenticationError | errors.AuthorizationError)


def in_words(error: BaseException) -> str:
    """What a passing fault is, for a log: one line, the same for the same state of the server."""
    while isinstance(error.__cause__, errors.RedisError):
        error = error.__cause__  # ours and redis-py's ConnectionErrors wrap what the server said
    match error:
        case errors.BusyLoadingError():
            return "it loads its data"
        case errors.OutOfMemoryError():
            return "its memory is full and it takes no writes (maxmemory, noeviction)"
        case errors.ReadOnlyError():
            return "it is a replica now and takes no writes"
        case errors.MasterDownError():
            return "it is a replica without its primary"
        case errors.ClusterDownError():
            return "the cluster is down"
        case errors.AskError() | errors.TryAgainError():
            return "the queue's slot is being moved"
        case errors.AuthenticationError() | errors.AuthorizationError():
            return f"it refuses the user name or password ({_first_line(error)})"
        case errors.TimeoutError() | TimeoutError():
            return "it does not answer in time"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
