"""`millstream queue`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from producer.cli import options
from producer.cli.flags import Panelled

group = typer.Typer(help="A queue as a whole: pause it, bound it, weigh its tenants.")


@group.command(cls=Panelled)
def pause(
    queue: options.QueueName = "default", redis_url: options.RedisUrl = None, as_json: options.AsJson = False
) -> None:
    """Let no more jobs start. Those that run go on, and more can be submitted."""
    _set_paused(True, queue, redis_url, as_json)


@group.command(cls=Panelled)
def resume(
    queue: options.QueueName = "default", redis_url: options.RedisUrl = None, as_json: options.AsJson = False
) -> None:
    """Let jobs start again."""
    _set_paused(False, queue, redis_url, as_json)


def _set_paused(paused: bool, queue: str, redis_url: str | None, as_json: bool) -> None:
    from producer.client import Client

    with Client(redis_url, queue) as client:
        if paused:
            client.pause()
        else:
            client.resume()
    if as_json:
        print(json.dumps({"queue": queue, "paused": paused}))
    else:
        print(f"queue {queue}: {'paused' if paused else 'open'}")


@group.command(cls=Panelled)
def limits(
    max_entries: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Jobs it holds, waiting and running; 0: the default."),
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Bytes of their payloads; 0: the default.")
    ] = None,
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Show how much a queue holds, after setting what is given. A full queue takes no more; what it has stays."""
    from producer.client import Client

    with Client(redis_url, queue) as client:
        found = client.limits(max_entries, max_bytes)
    if as_json:
        bounds = {"max_entries": found.max_entries, "max_bytes": found.max_bytes}
        print(json.dumps({"queue": queue, **bounds, "entries": found.entries, "bytes": found.bytes}))
    else:
        print(
            f"{found.entries:,} of {found.max_entries:,} jobs, {found.bytes:,} of {found.max_bytes:,} bytes"
        )


@group.command(cls=Panelled)
def weight(
    tenant: Annotated[str | None, typer.Argument(metavar="[TENANT]", help="Whose; none: show all.")] = None,
    share: Annotated[
        float | None,
        typer.Argument(
            metavar="[WEIGHT]", help="Picks for each one of a tenant of weight 1, which all have."
        ),
    ] = None,
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the tenants' weights, after setting one."""
    from producer.client import Client

    with Client(redis_url, queue) as client:
        if tenant is not None and share is not None:
            client.set_weight(tenant, share)
        found = client.weights()
    shown = found if tenant is None else {tenant: found.get(tenant, 1.0)}
    if as_json:
        print(json.dumps({"queue": queue, "weights": shown}))
        return
    for one, its in sorted(shown.items()):
        print(f"{one}  {its:g}")
    if not shown:
        print("every tenant has weight 1")
