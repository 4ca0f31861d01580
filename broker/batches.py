"""Batches, bulk runs that go on without their caller, as the server knows them. Their rows lie on disk.

    validating --> in_progress --> finalizing --> completed | expired
        |  '-----------+--> cancelling --> cancelled
        '--> failed

A batch is worked on in slices. Its hash holds the number of the slice that may say something of it; a slice that was
given up and turns out to be alive is refused, as an attempt at a job is that lost its lease.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from broker.keys import Keys
from broker.queue import Queue
from broker.script import Arg, Call, load

T = TypeVar("T")
SWEEP_EVERY_S = 30
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Start = Status | Literal["*"]
"""A status, or any."""
Ending = Literal["completed", "expired", "cancelled"]
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
TIMES = (
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch."""

    id: str
    status: Status
    ending: Ending
    """How it ends, as things stand."""
    slice: int
    """Which slice may work on it."""
    folder: str
    """Where its files are: on the machines of those who work on it."""
    output: str
    error_file: str
    """Both are there once it has ended, unless it has failed."""
    input: str
    """What the user named."""
    endpoint: str
    """Of the first row; empty before it was read."""
    window: str
    """How long it may take, as the user wrote it."""
    retention_s: int
    """How long it is kept after its end."""
    total: int
    completed: int
    failed: int
    times: Mapping[str, int]
    """Seconds since 1970 by the server's clock; those of `TIMES` that have come, and `expires_at`."""
    errors: list[dict[str, Any]]
    """Why it failed."""
    torn: list[str]
    """What of the input was missing, in words."""
    checked: bool
    """Whether its rows are counted."""
    webhook: Literal["", "wanted", "due", "delivered", "given up"]
    webhook_tries: int
    webhook_at: int
    """When it is tried next."""
    note: str
    """What holds it up; empty where nothing does."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.status in ENDED

    def waits_at(self, now: float) -> bool:
        """Whether a sweep may have something to do for it at a time: it goes on, tells its webhook, or is deleted."""
        return not self.has_ended or self.webhook == "due" or now >= self.ended_at + self.retention_s

    @property
    def ended_at(self) -> int:
        """When it ended."""
        return self.times[f"{self.status}_at"]


def submit(keys: Keys, batch_id: str, by: str, window_s: int, fields: Mapping[str, str | int]) -> Call[bool]:
    """Register a batch; False: it is there already.

    Args:
        by: who says so, a name that nobody else has: its call may be sent twice, and is answered as the first time.
    """
    return _call(keys, "batch_submit", batch_id, (by, window_s, *_pairs(fields)), bool)


def note(
    keys: Keys, batch_id: str, slice_: int, done: tuple[int, int] | None = None, why: str = ""
) -> Call[Status | None]:
    """Tell how a slice comes on; the batch's status, or None for a slice that was replaced.

    Args:
        done: rows that are completed and failed.
        why: what holds the batch up; a slice that ends takes it back.
    """
    counts: tuple[Arg, ...] = done or ("", "")
    return _call(keys, "batch_note", batch_id, (slice_, *counts, why), _status)


def advance(
    keys: Keys, batch_id: str, slice_: int, by: str, start: Start, to: Status | None, **fields: str | int
) -> Call[Status | None]:
    """End a slice; the batch's status then, or None for a slice that was replaced.

    Args:
        by: who says so, a name that no other process has: its call may be sent twice, another's is refused.
        start: the status that is changed; the batch keeps another one, as when somebody cancelled it.
        to: None: the same.
    """
    args = (slice_, by, start, to or "", *_pairs({"note": "", **fields}))
    return _call(keys, "batch_advance", batch_id, args, _status)


def cancel(keys: Keys, batch_id: str) -> Call[Status | None]:
    """Have a batch stop; its status then, or None where there is no such batch."""
    return _call(keys, "batch_cancel", batch_id, (), _status)


def show(queue: Queue, batch_id: str) -> Batch | None:
    """A batch; None where there is none of that id."""
    client: Any = queue.client
    return _batch(batch_id, client.hgetall(queue.keys.batch(batch_id)))


def show_all(queue: Queue) -> list[Batch]:
    """Every batch of a queue, the newest first."""
    client: Any = queue.client
    ids = [raw.decode() for raw in reversed(client.zrange(queue.keys.batches, 0, -1))]
    with client.pipeline(transaction=False) as pipe:
        for batch_id in ids:
            pipe.hgetall(queue.keys.batch(batch_id))
        found = zip(ids, pipe.execute(), strict=True)
    return [batch for batch_id, fields in found if (batch := _batch(batch_id, fields)) is not None]


def server_time(queue: Queue) -> int:
    """Seconds since 1970 by the server's clock."""
    client: Any = queue.client
    seconds, _ = client.time()
    return int(seconds)


def may_sweep(queue: Queue) -> bool:
    """Whether it is time that somebody looks at all batches, and it is the caller's turn."""
    client: Any = queue.client
    return bool(client.set(queue.keys.batches_swept, 1, nx=True, ex=SWEEP_EVERY_S))


def forget(queue: Queue, batch_id: str) -> None:
    """Delete what the server knows of a batch."""
    client: Any = queue.client
    with client.pipeline(transaction=False) as pipe:
        pipe.delete(queue.keys.batch(batch_id))
        pipe.zrem(queue.keys.batches, batch_id)
        pipe.execute()


def _call(keys: Keys, script: str, batch_id: str, args: tuple[Arg, ...], read: Callable[[Any], T]) -> Call[T]:
    return Call(load(script), keys.meta, (keys.base, batch_id, *args), read)


def _pairs(fields: Mapping[str, str | int]) -> list[Arg]:
    return [part for pair in fields.items() for part in pair]


def _status(reply: bytes | str | None) -> Status | None:
    status: Any = reply.decode() if isinstance(reply, bytes) else reply
    return cast("Status | None", status)


def _batch(batch_id: str, raw: Mapping[bytes, bytes]) -> Batch | None:
    fields: Any = {name.decode(): value.decode() for name, value in raw.items()}
    if "status" not in fields:
        return None
    return Batch(
        id=batch_id,
        status=fields["status"],
        ending=fields["ending"],
        slice=int(fields["slice"]),
        folder=fields["folder"],
        output=fields["output"],
        error_file=fields["error_file"],
        input=fields["input"],
        endpoint=fields.get("endpoint", ""),
        window=fields["window"],
        retention_s=int(fields["retention_s"]),
        total=int(fields["total"]),
        completed=int(fields["completed"]),
        failed=int(fields["failed"]),
        times={name: int(fields[name]) for name in TIMES if name in fields},
        errors=json.loads(fields.get("errors", "[]")),
        torn=json.loads(fields.get("torn", "[]")),
        checked="checked" in fields,
        webhook=fields.get("webhook", ""),
        webhook_tries=int(fields.get("webhook_tries", 0)),
        webhook_at=int(fields.get("webhook_at", 0)),
        note=fields.get("note", ""),
    )
