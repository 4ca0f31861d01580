"""What a submitted job looks like from the other side."""

from __future__ import annotations

from broker.connection import connect
from broker.keys import Keys
from protocol import Job


def queued(url: str, job_id: str) -> Job:
    """The job as a worker of the default queue would get it."""
    with connect(url) as client:
        payload = client.hget(Keys("default").job(job_id), "payload")
    assert isinstance(payload, bytes)
    return Job.decode(payload)
