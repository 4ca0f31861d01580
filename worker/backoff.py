"""How long a job waits before it is tried again."""

from __future__ import annotations

import random

FIRST_S = 1.0
LONGEST_S = 60.0


def backoff_s(retries: int) -> float:
    """Seconds until the next try of a job that was tried again so often already: doubling, and spread.

    The half of it that is drawn keeps jobs that failed together from coming back together.
    """
    longest = min(LONGEST_S, FIRST_S * 2.0 ** min(retries, 10))
    return random.uniform(longest / 2, longest)
