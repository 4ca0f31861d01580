"""How many bytes a job can make of itself, at most: in its log, on its channel and in its result.

A streamed token is an event of its own, which repeats the job's id; without a watcher 64 tokens share one. Measured
on events of SmolLM2: 140 to 160 bytes a streamed token, 15 to 20 a token in larger pieces, 96 more with its
log-probability and 64 more for each alternative.
"""

from __future__ import annotations

from protocol.job import Job

MOST_PAYLOAD_BYTES = 4 << 20
"""Largest job that is submitted: the server holds every waiting one in memory."""
MOST_LOG_BYTES = 256 << 20
"""Most that a job may log; the server takes no value above 512 MiB, and the result is one."""
LOGPROB_BYTES = 96
"""A token's log-probability, as JSON."""
ALTERNATIVE_BYTES = 64
"""One alternative to it."""
_EVENT_BYTES = 110
_TOKEN_BYTES = 24


def most_logged(job: Job) -> int | None:
    """Bytes of a job's log if every choice is as long as it may be; None where the model alone says how long."""
    params = job.params
    if params.token_limit is None:
        return None
    events = (_EVENT_BYTES + len(job.id)) // (1 if job.stream else 64)
    alternatives = params.num_logprobs
    logprob = 0 if alternatives is None else LOGPROB_BYTES + alternatives * ALTERNATIVE_BYTES
    return job.num_choices * params.token_limit * (_TOKEN_BYTES + events + logprob)
