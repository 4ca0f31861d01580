"""`millstream watch`."""

from __future__ import annotations

import typer

from producer.cli import options


def watch(
    job_id: options.JobId,
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Follow a job from first token to last, whenever it began."""
    from producer.cli import screen
    from producer.client import Client

    with Client(redis_url, queue) as client:
        code = screen.follow(client, client.job(job_id), as_json)
    raise typer.Exit(code)
