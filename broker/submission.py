"""A job as its submission travels."""

from __future__ import annotations

import math

from broker.script import Arg
from protocol import Job
from protocol.job import DEFAULT_MAX_RETRIES

LONGEST_MS = 100 * 365 * 24 * 3600 * 1000
"""A longer time from now is cut to this: the server refuses times it cannot add, and only when the job ends."""
LATEST_MS = 10**14 - 1
"""A later moment is cut to this, in the year 5138: Lua writes 14 digits of a number."""


def job_args(job: Job) -> tuple[Arg, ...]:
    """A job as `lua/submit.lua` and `lua/dead_requeue.lua` take it."""
    payload = job.encode()
    return (
        job.id,
        payload,
        Job.digest(payload),
        job.priority,
        job.tenant,
        job.run or "",
        _ms(job.result_ttl_s),
        _ms(job.not_before, LATEST_MS),
        _ms(job.delay_s),
        _ms(job.deadline, LATEST_MS),
        _ms(job.deadline_in_s),
        "" if job.max_retries == DEFAULT_MAX_RETRIES else job.max_retries,
    )


def payload_bytes(args: tuple[Arg, ...]) -> int:
    """Bytes of the payload of a job that `job_args` made."""
    payload = args[1]
    return len(payload) if isinstance(payload, bytes) else 0


def _ms(seconds: float | None, most: int = LONGEST_MS) -> int:
    return math.ceil(min((seconds or 0) * 1000, most))
