"""A job on the screen: text or JSON on stdout, everything about it on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from producer.cli import exits

if TYPE_CHECKING:
    from producer.client import Client, JobHandle
    from protocol import JobError


def note(text: str) -> None:
    """One line on stderr."""
    print(f"millstream: {text}", file=sys.stderr, flush=True)


def note_missing_worker(client: Client) -> None:
    """Say so if nobody would run the job."""
    if not any(beat.alive for beat in client.status().workers):
        name = client.queue.keys.queue
        queue = "" if name == "default" else f" --queue {name}"
        note(f"no worker serves queue {name} yet: start `millstream worker --model M{queue}`")


def follow(job: JobHandle, as_json: bool) -> int:
    """Show a job's events as they come, to the end; the exit code."""
    end = None
    for event in job.stream():
        if as_json:
            print(event.model_dump_json(exclude_none=True), flush=True)
        elif event.type == "token":
            sys.stdout.write(event.text)
            sys.stdout.flush()
        if event.type != "token":
            end = event
    assert end is not None
    if not as_json:
        print(flush=True)
    if end.type == "done":
        return exits.OK
    code = "" if end.code in (None, end.type) else f"{end.code}: "
    note(f"job {job.id}: {end.type}: {code}{end.message or 'no reason is recorded'}")
    return exits.FAILED


def describe(state: str, error: JobError | None) -> str:
    """How a job ended, in a line."""
    if error is None:
        return state
    return f"{state}: {error.message}" if error.code == state else f"{state}: {error.code}: {error.message}"
