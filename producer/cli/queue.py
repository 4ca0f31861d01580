"""`millstream queue`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from producer.cli import options
from producer.cli.flags import Panelled
from producer.printing import printable

if TYPE_CHECKING:
    from producer.client import Client

group = typer.Typer(help="Pause a queue, clear it, bound it, weigh its tenants.")


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
def clear(
    priority: Annotated[
        str | None, typer.Option(metavar="high|normal|low", help="Only jobs of this priority.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Only this tenant's jobs.")] = None,
    running: Annotated[bool, typer.Option("--running", help="Also cancel the jobs that run.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Cancel the jobs that wait. Asks before it does, on a terminal."""
    from producer.client import Client
    from protocol import PRIORITIES

    level = options.one_of("--priority", priority, PRIORITIES)
    with Client(redis_url, queue) as client:
        if not yes and not _is_empty(client, running):
            _ask(client, running, narrowed=level is not None or tenant is not None)
        cleared = client.clear(priority=level, tenant=tenant, running=running)
    if as_json:
        told = {"cancelled": cleared.cancelled, "cancelling": cleared.cancelling}
        print(json.dumps({"queue": queue, **told}))
        return
    theirs = f", {cleared.cancelling:,} that run are being cancelled" if running else ""
    print(f"queue {queue}: {cleared.cancelled:,} cancelled{theirs}")


def _is_empty(client: Client, running: bool) -> bool:
    """Whether there is nothing to ask about; that is said."""
    from producer.cli import screen

    found = client.status()
    if found.waiting or (running and found.running):
        return False
    screen.note(f"queue {client.queue.keys.queue}: there is nothing to clear")
    return True


def is_at_a_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


def _ask(client: Client, running: bool, narrowed: bool) -> None:
    """Have a user at a terminal agree.

    Raises:
        Refused: there is no terminal.
        typer.Exit: they do not agree.
    """
    from producer.cli import exits, screen
    from producer.refusal import Refused

    name, found = client.queue.keys.queue, client.status()
    jobs = f"{found.waiting:,} waiting" + (f" and {found.running:,} running" if running else "")
    which = f"some of the {jobs}" if narrowed else f"the {jobs}"
    if not is_at_a_terminal():
        raise Refused(f"queue {name}: this would cancel {which} jobs for good; give --yes to do it")
    print(f"queue {name}: cancel {which} jobs for good? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        screen.note("nothing was cancelled")
        raise typer.Exit(exits.FAILED)


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
        print(f"{printable(one)}  {its:g}")
    if not shown:
        print("every tenant has weight 1")
