"""Every change of a job's state, as a typed call. The scripts' contracts stand in `lua/`, one file each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import ValidationError

from broker.keys import Keys
from broker.loading import Loading, read_loading
from broker.parts import in_parts
from broker.script import Arg, Call, load
from broker.submission import job_args, payload_bytes
from protocol import Fingerprint, Job, MillstreamError, Result, State, TerminalState, describe_validation
from protocol.job import DEFAULT_MAX_RETRIES

T = TypeVar("T")

DEFAULT_MAX_ENTRIES = 100_000
"""Jobs a queue holds (waiting and running) unless its meta says otherwise."""
DEFAULT_MAX_BYTES = 1 << 30
"""Payload bytes a queue holds unless its meta says otherwise."""
ALIVE_MS = 15_000
"""A worker whose last heartbeat is older counts as gone."""
FORGET_WORKER_MS = 10 * 60_000
"""After this long without a heartbeat a worker's entry is removed."""


class Submitted(msgspec.Struct, frozen=True, gc=False):
    """What `submit` answered."""

    outcome: Literal["queued", "same", "conflict", "full"]
    state: State | None = None
    entries: int = 0
    bytes: int = 0
    max_entries: int = 0
    max_bytes: int = 0


class Lease(msgspec.Struct, frozen=True, gc=False):
    """A job granted to a worker. `attempt` is the fencing token of everything the worker says about it."""

    id: str
    attempt: int
    crashes: int
    logged: int
    """Events earlier attempts have logged; the next event is `logged + 1`."""
    started_ms: int
    """First lease of any attempt, server clock."""
    leased_ms: int
    """This lease, server clock: what the worker reckons the end from."""
    payload: bytes
    deadline_ms: int | None = None
    """When it is to be stopped, server clock; None: never."""
    retries: int = 0
    """How often it was handed back to be tried again later."""
    max_retries: int = DEFAULT_MAX_RETRIES
    worker: str = ""
    """Who holds it: the other half of the fence, since a server that lost data may grant an attempt twice."""


@dataclass(frozen=True, slots=True)
class Leased:
    """What `lease` answered."""

    leases: list[Lease]
    next_ms: int | None
    """Where fewer were granted than asked for: ms until something of this queue falls due (a lease lapses, the time
    of a waiting job comes); 0: there is more to be had now; None: nothing is known to."""
    paused: bool = False
    """The queue grants nothing, whatever waits."""


@dataclass(frozen=True, slots=True)
class Handback:
    """A lease that a worker gives back."""

    id: str
    attempt: int
    crashed: bool = False
    """The process that ran the job died."""
    retry_in_ms: int = 0
    """Above 0: the job is tried again, not before that time is over, and this counts as one of its retries."""


class Published(msgspec.Struct, frozen=True, gc=False):
    """What `publish` answered; `logged` is the length of the log."""

    outcome: Literal["ok", "cancel", "lost", "gap"]
    logged: int


Renewed = Literal["held", "cancel", "lost"]
Finished = Literal["ok", "lost", "gap"]
Beaten = Literal["ok", "unknown"]
Cancelled = Literal["cancelled", "cancelling", "ended", "unknown"]


@dataclass(frozen=True, slots=True)
class Look:
    """Where a job stands. `state` None: no such job, or its result has expired."""

    state: State | None
    result: Result | None
    attempt: int
    worker: str


@dataclass(frozen=True, slots=True)
class WorkerBeat:
    """A worker's last heartbeat."""

    worker: str
    age_ms: int
    info: dict[str, Any]

    @property
    def alive(self) -> bool:
        """Whether it was heard of recently."""
        return self.age_ms <= ALIVE_MS


@dataclass(frozen=True, slots=True)
class Status:
    """The queue at a glance."""

    fingerprint: Fingerprint | None
    waiting: int
    running: int
    bytes: int
    dead: int
    paused: bool
    workers: tuple[WorkerBeat, ...]
    delayed: int = 0
    """How many of those that wait do so for their time."""
    loading: tuple[Loading, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a queue holds, and how much there is."""

    max_entries: int
    max_bytes: int
    entries: int
    bytes: int


def _text(raw: bytes | str) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw


def _result_of(job_id: str, stored: bytes) -> Result:
    """A job's result.

    Raises:
        MillstreamError: somebody spoilt it.
    """
    try:
        return Result.decode(stored)
    except ValidationError as error:
        raise MillstreamError(
            f"job {job_id}: what is stored as its result is none: {describe_validation(error)}"
        ) from None


def _bound_to(stored: bytes) -> Fingerprint:
    """The model that a queue serves.

    Raises:
        MillstreamError: somebody spoilt the field.
    """
    try:
        return Fingerprint.model_validate_json(stored)
    except ValidationError as error:
        raise MillstreamError(
            f"the queue's meta names no model in its field `fingerprint`: {describe_validation(error)}"
        ) from None


def _only(call: Call[list[T]]) -> Call[T]:
    """A call for many, made for one."""
    return Call(call.script, call.key, call.args, lambda reply: call.read(reply)[0])


def submit_all(keys: Keys, jobs: Iterable[Job]) -> Call[list[Submitted]]:
    """Store and queue jobs, in order; an answer for each. From the first that finds no room on none is taken.

    One script holds up the server while it runs: `submit_parts` makes several of many jobs.
    """
    return _submit(keys, [job_args(job) for job in jobs])


def submit_parts(keys: Keys, jobs: Iterable[Job]) -> list[Call[list[Submitted]]]:
    """As `submit_all`, for any number of jobs: the calls to run one after the other, best in one pipeline."""
    return submit_encoded(keys, map(job_args, jobs))


def submit_encoded(keys: Keys, jobs: Iterable[tuple[Arg, ...]]) -> list[Call[list[Submitted]]]:
    """As `submit_parts`, for jobs as `job_args` gives them."""
    return [_submit(keys, part) for part in in_parts(jobs, payload_bytes)]


def submit(keys: Keys, job: Job) -> Call[Submitted]:
    """Store and queue one job; as `submit_all`."""
    return _only(submit_all(keys, [job]))


def _submit(keys: Keys, jobs: Sequence[tuple[Arg, ...]]) -> Call[list[Submitted]]:
    args = (keys.base, DEFAULT_MAX_ENTRIES, DEFAULT_MAX_BYTES, *chain.from_iterable(jobs))
    return Call(load("submit"), keys.meta, args, lambda reply: [_submitted(answer) for answer in reply])


def _submitted(answer: list[Any]) -> Submitted:
    outcome: Any = _text(answer[0])
    if outcome == "full":
        return Submitted(outcome, None, *(int(number) for number in answer[1:]))
    state: Any = _text(answer[1]) if len(answer) > 1 else "queued"
    return Submitted(outcome, state)


def lease(keys: Keys, worker: str, number: int, count: int, lease_ms: int) -> Call[Leased]:
    """Lease up to `count` jobs. `number` is the worker's own count of its lease requests, from 1."""

    def read(reply: list[Any]) -> Leased:
        granted, next_ms, paused = reply
        numbers = {text: _numbers(text) for text in {text for _, _, text in granted}}
        leases = [
            Lease(id=_text(job_id), payload=payload, worker=worker, **numbers[text])
            for job_id, payload, text in granted
        ]
        return Leased(leases, None if next_ms < 0 else next_ms, paused == 1)

    return Call(load("lease"), keys.meta, (keys.base, worker, number, count, lease_ms), read)


_NUMBERS = (
    *("attempt", "crashes", "logged", "started_ms", "leased_ms"),
    *("deadline_ms", "retries", "max_retries"),
)


def _numbers(text: bytes) -> dict[str, Any]:
    """The fields of a lease that are numbers."""
    numbers: dict[str, Any] = dict(zip(_NUMBERS, map(int, text.split(b",")), strict=True))
    return numbers | {"deadline_ms": numbers["deadline_ms"] or None}


def renew(keys: Keys, worker: str, lease_ms: int, held: Sequence[tuple[str, int]]) -> Call[list[Renewed]]:
    """Renew leases, given as (id, attempt); one answer for each, in order."""
    pairs = [part for pair in held for part in pair]

    def read(reply: list[Any]) -> list[Renewed]:
        answers: list[Any] = [_text(answer) for answer in reply]
        return answers

    return Call(load("renew"), keys.meta, (keys.base, worker, lease_ms, *pairs), read)


class News(msgspec.Struct, frozen=True, gc=False):
    """What a job that a worker holds has to say."""

    id: str
    attempt: int
    first_seq: int
    events: Sequence[bytes]


def publish_all(keys: Keys, worker: str, news: Sequence[News]) -> Call[list[Published]]:
    """Log and publish the next events of jobs; an answer for each. No job may stand there twice."""
    args: list[Arg] = [keys.base, worker]
    for one in news:
        args += (one.id, one.attempt, one.first_seq, len(one.events))
        args += one.events

    def read(reply: list[Any]) -> list[Published]:
        answers: list[Any] = [(_text(outcome), logged) for outcome, logged in reply]
        return [Published(*answer) for answer in answers]

    return Call(load("publish"), keys.meta, tuple(args), read)


def publish(
    keys: Keys, worker: str, job_id: str, attempt: int, first_seq: int, events: Sequence[bytes]
) -> Call[Published]:
    """Log and publish events of one job, numbered from `first_seq` on; as `publish_all`."""
    return _only(publish_all(keys, worker, [News(job_id, attempt, first_seq, events)]))


class Ending(msgspec.Struct, frozen=True, gc=False):
    """The end of a job that a worker holds."""

    id: str
    attempt: int
    state: TerminalState
    result: bytes
    first_seq: int
    """Of the events; 0: nobody streams the job and nothing of it is logged. It gets no log: its result says all."""
    events: Sequence[bytes]
    """Its last events, the terminal one included."""
    dead_reason: str = ""
    """What its dead letter says; empty: it gets none."""


def finish_all(keys: Keys, worker: str, endings: Sequence[Ending]) -> Call[list[Finished]]:
    """End jobs, with everything that goes with the end; an answer for each. No job may stand there twice."""
    args: list[Arg] = [keys.base, worker]
    for one in endings:
        args += (one.id, one.attempt, one.state, one.result, one.dead_reason, one.first_seq, len(one.events))
        args += one.events

    def read(reply: list[Any]) -> list[Finished]:
        answers: list[Any] = [_text(answer) for answer in reply]
        return answers

    return Call(load("finish"), keys.meta, tuple(args), read)


def finish(
    keys: Keys,
    worker: str,
    job_id: str,
    attempt: int,
    state: TerminalState,
    result: bytes,
    first_seq: int,
    events: Sequence[bytes],
    dead_reason: str = "",
) -> Call[Finished]:
    """End one job; as `finish_all`."""
    ending = Ending(job_id, attempt, state, result, first_seq, events, dead_reason)
    return _only(finish_all(keys, worker, [ending]))


def release(keys: Keys, worker: str, handed: Sequence[Handback]) -> Call[int]:
    """Hand leases back; the number handed back."""
    parts = [part for one in handed for part in (one.id, one.attempt, int(one.crashed), one.retry_in_ms)]
    return Call(load("release"), keys.meta, (keys.base, worker, *parts), int)


def cancel(keys: Keys, job_id: str) -> Call[tuple[Cancelled, State | None]]:
    """Cancel a job; for one that has ended, how it ended."""

    def read(reply: list[Any]) -> tuple[Cancelled, State | None]:
        answer: Any = _text(reply[0])
        state: Any = _text(reply[1]) if len(reply) > 1 else None
        return answer, state

    return Call(load("cancel"), keys.meta, (keys.base, job_id), read)


def look(keys: Keys, job_id: str) -> Call[Look]:
    """Where a job stands, and its result once it has one."""

    def read(reply: list[Any]) -> Look:
        state: Any = _text(reply[0]) if reply[0] is not None else None
        result = _result_of(job_id, reply[1]) if reply[1] is not None else None
        return Look(state, result, int(reply[2]), _text(reply[3]))

    return Call(load("look"), keys.meta, (keys.base, job_id), read)


def register(keys: Keys, worker: str, fingerprint: Fingerprint) -> Call[Fingerprint | None]:
    """Bind the queue to the worker's model. None: agreed; else the model the queue serves."""

    def read(reply: list[Any]) -> Fingerprint | None:
        return None if _text(reply[0]) == "ok" else _bound_to(reply[1])

    return Call(load("register"), keys.meta, (keys.base, worker, fingerprint.encode(), ALIVE_MS), read)


def heartbeat(keys: Keys, worker: str, info: dict[str, Any]) -> Call[Beaten]:
    """Say that a worker lives, and how it does. `unknown`: not noted before it registers again."""
    args: tuple[Arg, ...] = (keys.base, worker, json.dumps(info, separators=(",", ":")), FORGET_WORKER_MS)

    def read(reply: Any) -> Beaten:
        answer: Beaten = reply.decode()
        return answer

    return Call(load("heartbeat"), keys.meta, args, read)


def status(keys: Keys) -> Call[Status]:
    """The queue at a glance."""

    def read(reply: list[Any]) -> Status:
        now, bound, entries, size, running, dead, paused, delayed, beats, told = reply
        workers = []
        for worker, beat in zip(beats[::2], beats[1::2], strict=True):
            with suppress(ValueError):  # somebody spoilt it: the next heartbeat makes it good
                at, _, info = _text(beat).partition(" ")
                told_of = json.loads(info)
                if isinstance(told_of, dict):
                    workers.append(WorkerBeat(_text(worker), int(now) - int(at), told_of))
        fingerprint = _bound_to(bound) if bound is not None else None
        waiting = entries - running
        loading = read_loading(told, int(now), ALIVE_MS, {beat.worker for beat in workers})
        return Status(
            fingerprint, waiting, running, size, dead, paused == 1, tuple(workers), delayed, loading
        )

    return Call(load("status"), keys.meta, (keys.base,), read)


def forget(keys: Keys, run: str, ended: Sequence[tuple[str, str]]) -> Call[int]:
    """Delete ended jobs of a bulk run and entries of its stream, given as (id, entry); an empty entry is none."""
    pairs = [part for pair in ended for part in pair]
    return Call(load("forget"), keys.meta, (keys.base, run, *pairs), int)


def pause(keys: Keys, paused: bool) -> Call[bool]:
    """Stop granting leases, or go on; whether the queue is paused now."""
    return Call(
        load("pause"), keys.meta, (keys.base, int(paused)), lambda reply: bool(_text(reply) == "paused")
    )


def limits(keys: Keys, max_entries: int | None = None, max_bytes: int | None = None) -> Call[Limits]:
    """Set how much the queue holds, or ask. None leaves a bound as it is, 0 sets it to the default."""
    given = ("" if most is None else most for most in (max_entries, max_bytes))
    args: tuple[Arg, ...] = (keys.base, *given, DEFAULT_MAX_ENTRIES, DEFAULT_MAX_BYTES)
    return Call(load("limits"), keys.meta, args, lambda reply: Limits(*reply))


def weights(keys: Keys, tenant: str = "", weight: float = 1.0) -> Call[dict[str, float]]:
    """Give a tenant a weight, above 0, or only ask: every weight that is not 1, by tenant."""

    def read(reply: list[Any]) -> dict[str, float]:
        weights: dict[str, float] = {}
        for name, value in zip(reply[::2], reply[1::2], strict=True):
            with suppress(ValueError):  # somebody spoilt it: it counts as 1
                weights[_text(name)] = float(value)
        return weights

    return Call(load("weight"), keys.meta, (keys.base, tenant, repr(float(weight))), read)
