"""A job as its submission travels."""

from __future__ import annotations

import math
from collections.abc import Iterable

from broker.script import Arg
from protocol import Job


def job_args(job: Job) -> tuple[Arg, ...]:
    """A job as `lua/submit.lua` and `lua/dead_requeue.lua` take it."""
    payload = job.encode()
    about = (job.priority, job.tenant, job.run or "", _ms(job.result_ttl_s), job.max_retries)
    return job.id, payload, Job.digest(payload), _joined(about), _times(job)


def payload_bytes(args: tuple[Arg, ...]) -> int:
    """Bytes of the payload of a job that `job_args` made."""
    payload = args[1]
    return len(payload) if isinstance(payload, bytes) else 0


def _times(job: Job) -> str:
    """Empty for a job that may start at once and has no deadline."""
    times = (_ms(job.not_before), _ms(job.delay_s), _end_ms(job.deadline), _end_ms(job.deadline_in_s))
    return _joined(times) if any(times) else ""


def _joined(parts: Iterable[str | int]) -> str:
    """Packed for the scripts: names have no commas, and one argument costs both sides less than five."""
    return ",".join(map(str, parts))


def _end_ms(seconds: float | None) -> int:
    """A deadline: one that is 0 has passed, and to the scripts 0 is none."""
    return 0 if seconds is None else max(1, _ms(seconds))


def _ms(seconds: float | None) -> int:
    return math.ceil((seconds or 0) * 1000)
