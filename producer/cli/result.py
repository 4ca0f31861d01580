"""`millstream result`."""

from __future__ import annotations

from typing import Annotated

import typer

from producer.cli import exits, options


def result(
    job_id: options.JobId,
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            callback=options.seconds,
            help="How long to wait for the end.",
        ),
    ] = 0.0,
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Print a job's text, or with --json all of its result. Exit code 5: it has not ended."""
    from producer.cli import screen
    from producer.client import Client

    with Client(redis_url, queue) as client:
        try:
            ended = client.job(job_id).result(timeout=wait)
        except TimeoutError as error:
            screen.note(str(error))
            raise typer.Exit(exits.NOT_YET) from None
    if as_json:
        print(ended.model_dump_json(exclude_none=True))
    elif ended.state == "succeeded":
        screen.show(ended.choices)
    if ended.state != "succeeded":
        screen.note(f"job {job_id}: {screen.describe(ended.state, ended.error)}")
        raise typer.Exit(exits.FAILED)
