"""`millstream cancel`."""

from __future__ import annotations

import json

import typer

from producer.cli import exits, options


def cancel(
    job_id: options.JobId,
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Stop a job, waiting or running. Exit code 1: it had ended, or is not known."""
    from producer.cli import screen
    from producer.client import Client
    from protocol import JobNotFound

    with Client(redis_url, queue) as client:
        outcome, state = client.job(job_id).cancel()
    if as_json:
        print(json.dumps({"id": job_id, "outcome": outcome, "state": state}))
    elif outcome in ("cancelled", "cancelling"):
        print(outcome)
    if outcome == "unknown":
        screen.note(str(JobNotFound.of(job_id)))
    elif outcome == "ended":
        screen.note(f"job {job_id}: it has ended already ({state})")
    if outcome == "unknown" or state not in (None, "cancelled"):
        raise typer.Exit(exits.FAILED)
