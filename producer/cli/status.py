"""`millstream status`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from producer.cli import exits, options
from producer.printing import printable

if TYPE_CHECKING:
    from broker.calls import Status, WorkerBeat
    from broker.loading import Loading
    from producer.client import Client

_LOOK_EVERY_S = 0.2
_PARTS = ("schedule", "forward", "sample", "output")
_FIGURES = (
    "slots_used",
    "kv_used",
    "kv_unused",
    "cached",
    "preemptions",
    "computed_twice",
    "step_ms",
    *_PARTS,
)


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
        found = client.status()
        if wait_ready and not _alive(found):
            screen.note(f"waiting for a worker of queue {queue}: {_why_none(found)}")
            found = _when_ready(client, deadline)
    if as_json:
        print(json.dumps(_as_dict(queue, found)))
    else:
        _show(queue, found)
    if wait_ready is not None and not _alive(found):
        screen.note(f"no worker serves queue {queue} after {wait_ready:g} s: {_why_none(found)}")
        raise typer.Exit(exits.FAILED)


def _when_ready(client: Client, deadline: float) -> Status:
    """The first status with a live worker, or the last one before the deadline. A heartbeat wakes nobody: look."""
    while not _alive(found := client.status()) and (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(_LOOK_EVERY_S, left_s))
    return found


def _why_none(found: Status) -> str:
    """What is known of the workers, none of which is ready."""
    if found.loading:
        return "; ".join(map(_loading_line, found.loading))
    if not found.workers:
        return "none has come yet"
    last = min(found.workers, key=lambda beat: beat.age_ms)
    model = printable(last.info.get("model", "a model that it has not told"))
    return f"the last was {printable(last.worker)} with {model}, heard of {last.age_ms / 1000:.0f} s ago"


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
        "delayed": found.delayed,
        "workers": [
            {**beat.info, "worker": beat.worker, "age_s": beat.age_ms / 1000, "alive": beat.alive}
            for beat in found.workers
        ],
        "loading": [
            {"worker": one.worker, "model": one.model, "since_s": one.since_ms / 1000}
            for one in found.loading
        ],
    }


def _show(queue: str, found: Status) -> None:
    paused = "; paused" if found.paused else ""
    print(f"queue {queue}: {printable(found.fingerprint or 'no model yet')}{paused}")
    for_their_time = f" ({found.delayed:,} for their time)" if found.delayed else ""
    print(
        f"{found.waiting:,} waiting{for_their_time}, {found.running:,} running ({found.bytes:,} bytes), "
        f"{found.dead:,} dead letters"
    )
    for one in found.loading:
        print(_loading_line(one))
    if not found.workers and not found.loading:
        print("no worker")
    for beat in found.workers:
        print("", *_worker_lines(beat), sep="\n")


def _loading_line(one: Loading) -> str:
    return f"{printable(one.worker)} loads {printable(one.model)} since {one.since_ms / 1000:.0f} s"


def _worker_lines(beat: WorkerBeat) -> list[str]:
    """A worker; with names of a usual length no line is longer than 80 columns.

    Lines, not a table: beside names of 40 letters, which is what a model's and a worker's have, nothing else fits.
    """
    info = beat.info
    running, waiting, slots, pid = (
        printable(info.get(name, "-")) for name in ("running", "waiting", "slots", "pid")
    )
    lately = info.get("lately")
    speed = "-" if lately is None else f"{lately.get('tokens_per_s', 0):,.0f}"
    lines = [
        f"worker {printable(beat.worker)}",
        f"  model {printable(info.get('model', '-'))}",
        f"  host {printable(info.get('host', '-'))}, pid {pid}",
        f"  heard of {beat.age_ms / 1000:.0f} s ago{'' if beat.alive else ' (gone)'}",
        f"  {running} running, {waiting} waiting, {slots} slots, {speed} tokens/s",
    ]
    return lines + _lately_lines(lately) if lately else lines


def _lately_lines(lately: dict[str, float]) -> list[str]:
    """What a working worker's engine did in the last minute."""
    told = {name: _figure(name, lately.get(name)) for name in _FIGURES}
    parts = ", ".join(f"{part} {told[part]}" for part in _PARTS)
    return [
        f"  last minute: slots {told['slots_used']}, KV {told['kv_used']} ({told['kv_unused']} unused), "
        f"cache {told['cached']}",
        f"    preempted {told['preemptions']} ({told['computed_twice']} computed twice)",
        f"    step {told['step_ms']}: {parts}",
    ]


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return {"preemptions": f"{value:,.0f}", "step_ms": f"{value:,.0f} ms"}.get(
        name, f"{value:.0%}" if name in _PARTS else f"{value:.1%}"
    )
