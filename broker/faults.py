"""Which faults of a server pass by waiting."""

from __future__ import annotations

import redis.exceptions as errors

PASSING = (
    errors.ConnectionError,
    errors.TimeoutError,
    errors.ReadOnlyError,
    errors.OutOfMemoryError,
    errors.MasterDownError,
    errors.TryAgainError,
    OSError,
)
"""It restarts, another takes its place, or it is full; a BusyLoadingError is a ConnectionError."""
PASSING_WORDS = ("MISCONF ", "NOREPLICAS ", "BUSY ")
"""As `PASSING`, where redis-py has no class: it cannot save, has too few replicas, runs a long script."""


def passes(error: Exception) -> bool:
    """Whether waiting can mend it."""
    return isinstance(error, PASSING) or str(error).startswith(PASSING_WORDS)
