"""`millstream status`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from producer.cli import exits, options

if TYPE_CHECKING:
    from rich.console import Console

    from broker.calls import Status, WorkerBeat
    from producer.client import Client

_LOOK_EVERY_S = 0.2


def status(
    queue: options.QueueName = "default",
    redis_url: options.RedisUrl = None,
    wait_ready: Annotated[
        float | None,
        typer.Option(
            callback=options.seconds,
            metavar="SECONDS",
            help="Wait until a worker is alive; exit code 1 if none is by then.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a queue: its jobs and its workers."""
    from producer.cli import screen
    from producer.client import Client

    deadline = time.monotonic() + (wait_ready or 0.0)
    with Client(redis_url, queue, patience_s=wait_ready or 0.0) as client:
        found = client.status() if wait_ready is None else _when_ready(client, deadline)
    if as_json:
        print(json.dumps(_as_dict(queue, found)))
    else:
        _show(queue, found)
    if wait_ready is not None and not _alive(found):
        screen.note(f"no worker serves queue {queue} after {wait_ready:g} s")
        raise typer.Exit(exits.FAILED)


def _when_ready(client: Client, deadline: float) -> Status:
    """The first status with a live worker, or the last one before the deadline. A heartbeat wakes nobody: look."""
    while not _alive(found := client.status()) and (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(_LOOK_EVERY_S, left_s))
    return found


def _alive(found: Status) -> list[WorkerBeat]:
    return [beat for beat in found.workers if beat.alive]


def _as_dict(queue: str, found: Status) -> dict[str, Any]:
    return {
        "queue": queue,
        "model": str(found.fingerprint) if found.fingerprint else None,
        "waiting": found.waiting,
        "running": found.running,
        "bytes": found.bytes,
        "dead": found.dead,
        "paused": found.paused,
        "workers": [
            {**beat.info, "worker": beat.worker, "age_s": beat.age_ms / 1000, "alive": beat.alive}
            for beat in found.workers
        ],
    }


def _show(queue: str, found: Status) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    paused = "; paused" if found.paused else ""
    console.print(f"queue {queue}: {found.fingerprint or 'no model yet'}{paused}", markup=False)
    console.print(
        f"{found.waiting:,} waiting, {found.running:,} running ({found.bytes:,} bytes), {found.dead:,} dead letters"
    )
    if not found.workers:
        console.print("no worker")
        return
    table = Table(
        "worker", "host", "pid", "model", "running", "waiting", "slots", "tokens/s", "heard of", box=None
    )
    for beat in found.workers:
        info = beat.info
        cells = [str(info.get(name, "-")) for name in ("host", "pid", "model", "running", "waiting", "slots")]
        speed = info.get("tokens_per_s")
        age = f"{beat.age_ms / 1000:.0f} s ago" + ("" if beat.alive else " (gone)")
        table.add_row(beat.worker, *cells, "-" if speed is None else f"{speed:,.0f}", age)
    console.print(table)
    _show_inside(console, [beat for beat in found.workers if beat.info.get("lately")])


def _show_inside(console: Console, beats: list[WorkerBeat]) -> None:
    """What the engines of working workers did in the last minute."""
    from rich.table import Table

    if not beats:
        return
    columns = {
        "slots": "slots_used",
        "KV": "kv_used",
        "unused": "kv_unused",
        "cache": "cached",
        "preempted": "preemptions",
        "twice": "computed_twice",
        "step": "step_ms",
        **{part: part for part in ("schedule", "forward", "sample", "output")},
    }
    table = Table("last minute", *columns, box=None)
    for beat in beats:
        table.add_row(
            beat.worker, *(_figure(name, beat.info["lately"].get(name)) for name in columns.values())
        )
    console.print(table)


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return {"preemptions": f"{value:,.0f}", "step_ms": f"{value:,.0f} ms"}.get(name, f"{value:.1%}")
