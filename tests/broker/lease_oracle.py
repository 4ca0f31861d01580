"""What a step must answer and do to a job, said once more and plainly, without a server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from protocol import TERMINAL_STATES

EVENT_OF_STATE = {
    "succeeded": "done",
    "failed": "error",
    "cancelled": "cancelled",
    "expired": "expired",
    "dead": "dead",
}


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happens."""

    kind: str
    worker: str = ""
    attempt: int = 0
    seq: int = 0
    state: str = ""
    number: int = 0
    crashed: bool = False
    retry_ms: int = 0
    again: bool = False

    @property
    def dead_reason(self) -> str:
        """What goes with an end in the dead letters."""
        return "why" if self.state == "dead" else ""

    def __str__(self) -> str:
        parts = [self.worker, self.kind, self.state, f"attempt {self.attempt}" if self.attempt else ""]
        parts += [f"seq {self.seq}" if self.seq else "", "again" if self.again else ""]
        return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class View:
    """One job as the server has it."""

    state: str | None = None
    attempt: int = 0
    worker: str = ""
    marked: bool = False
    leased_until: str | None = None
    """`past`, `future`, or None without a lease; so of the other times."""
    delayed_until: str | None = None
    deadline: str | None = None
    log: tuple[str, ...] = ()
    result: str | None = None
    announced: int = 0
    entries: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, keys: dict[str, Any], job_id: str) -> Self:
        """From the contents of a queue's keys."""
        job = keys.get(f"job:{job_id}", {})
        meta = keys.get("meta", {})
        return cls(
            state=job.get("state"),
            attempt=int(job.get("attempt", 0)),
            worker=job.get("worker", ""),
            marked="cancel" in job,
            leased_until=_when(keys.get("leases", {}).get(job_id)),
            delayed_until=_when(keys.get("delayed", {}).get(job_id)),
            deadline=_when(job.get("deadline")),
            log=tuple(keys.get(f"log:{job_id}", ())),
            result=_result(keys, job_id),
            announced=len(keys.get("done:r", ())),
            entries=int(meta.get("entries", 0)),
            bytes=int(meta.get("bytes", 0)),
        )

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def owned(self) -> bool:
        """A living worker has it."""
        return self.state == "running" and self.leased_until == "future"

    def is_owner(self, step: Step) -> bool:
        return self.state == "running" and (self.attempt, self.worker) == (step.attempt, step.worker)


def _result(keys: dict[str, Any], job_id: str) -> str | None:
    """From where the job's run was told of its end: entries are [id, [job id, result, ...]]."""
    for entry, told in keys.get("done:r", ()):
        if entry == keys.get(f"job:{job_id}", {}).get("entry"):
            return dict(zip(told[::2], told[1::2], strict=True)).get(job_id)
    return None


def _when(score: str | None) -> str | None:
    """The model sets times to 0 or 1, or far into the future."""
    return None if score is None else "past" if float(score) < 2 else "future"


def expected(before: View, step: Step, said: Any, after: View) -> None:
    """Raises AssertionError where the answer or what it did is not what it must be."""
    if step.kind in ("lapse", "due", "deadline"):
        return
    CHECKS[step.kind](before, step, said, after)


def _unchanged(before: View, after: View) -> None:
    assert after == before, "it changed the job"


def _submit(before: View, _: Step, said: Any, after: View) -> None:
    if before.state is None:
        assert said == "queued", "a new job was not taken"
        assert (after.state, after.attempt) == ("queued", 0), "a new job does not wait"
    else:
        assert said == "same", "a job was taken twice"
        _unchanged(before, after)


def _ended_unowned(before: View, after: View) -> bool:
    """A job past its deadline that nobody has is ended by whoever comes by."""
    if before.ended or before.state is None or before.owned or before.deadline != "past":
        return False
    assert after.state == "expired", "it waits on, past its deadline"
    return True


def _cancel(before: View, _: Step, said: Any, after: View) -> None:
    if before.state is None:
        assert said == ("unknown", None), "it was never submitted"
    elif before.ended:
        assert said == ("ended", before.state), "it has ended"
        _unchanged(before, after)
    elif _ended_unowned(before, after):
        assert said == ("ended", "expired"), "it was past its deadline"
    elif before.owned:
        assert said == ("cancelling", None), "its owner must be told"
        assert after.marked, "its owner is not told"
    else:
        assert said == ("cancelled", None), "nobody has it"
        assert after.state == "cancelled", "it was not cancelled"


def _look(before: View, _: Step, said: Any, after: View) -> None:
    if not _ended_unowned(before, after):
        _unchanged(before, after)
    assert said == after.state, "another state than the job's"


def _beat(before: View, _: Step, __: Any, after: View) -> None:
    if _ended_unowned(before, after):
        return
    same = (before.state, before.attempt, before.log)
    assert (after.state, after.attempt, after.log) == same, "a heartbeat changed the job"
    if before.owned:
        _unchanged(before, after)


def _lease(before: View, step: Step, said: Any, after: View) -> None:
    if step.again and step.attempt:
        grant = [(step.attempt, said[0][1])] if said else []
        assert said == grant, "another attempt than was granted"
        assert bool(said) == before.is_owner(step), "not what is still held of what was granted"
        assert after.owned or not said, "granted again, and the lease has lapsed"
        _unchanged(replace(before, leased_until="future") if said else before, after)
    elif before.ended or before.owned or before.state is None:
        assert said == [], "granted though somebody has it, or it has ended"
        _unchanged(before, after)
    elif before.marked:
        assert said == [], "granted though it was cancelled"
        assert after.state in ("cancelled", "expired"), "a cancelled job waits on"
    elif _ended_unowned(before, after) or before.delayed_until == "future":
        assert said == [], "granted after its deadline or before its time"
    else:
        assert said == [(before.attempt + 1, len(before.log))], "not granted as the next attempt"
        owner = ("running", before.attempt + 1, step.worker)
        assert (after.state, after.attempt, after.worker) == owner, "it is not the new owner's"
        assert after.owned, "granted, and the lease has lapsed"
        assert after.log == before.log, "a lease changed the log"


def _renew(before: View, step: Step, said: Any, after: View) -> None:
    if before.is_owner(step):
        assert said == ["cancel" if before.marked else "held"], "the owner was refused"
        assert after.owned, "renewed, and the lease has lapsed"
        assert after.attempt == before.attempt, "a renewal changed the attempt"
    else:
        assert said == ["lost"], "a zombie's renewal was taken"
        _unchanged(before, after)


def _publish(before: View, step: Step, said: Any, after: View) -> None:
    if not before.is_owner(step):
        assert said == "lost", "a zombie's words were taken"
        _unchanged(before, after)
        return
    assert said == ("cancel" if before.marked else "ok"), "the owner was refused"
    assert len(after.log) == max(len(before.log), step.seq), "an event was dropped or doubled"
    assert (after.state, after.attempt) == (before.state, before.attempt), "publishing changed the job"


def _finish(before: View, step: Step, said: Any, after: View) -> None:
    if before.is_owner(step):
        assert said == "ok", "the owner was refused"
        assert (after.state, after.attempt) == (step.state, step.attempt), "another end than was told"
    else:
        ended_by_it = (before.state, before.attempt) == (step.state, step.attempt)
        assert said == ("ok" if ended_by_it else "lost"), (
            "a zombie's end was taken, or a repeated one refused"
        )
        _unchanged(before, after)


def _release(before: View, step: Step, said: Any, after: View) -> None:
    if not before.is_owner(step):
        assert said == 0, "a zombie handed a lease back"
        _unchanged(before, after)
        return
    assert said == 1, "the owner was refused"
    assert not after.owned, "handed back, and still leased"
    if before.marked:
        assert after.state == "cancelled", "a cancelled job waits on"
    elif before.deadline == "past":
        assert after.state == "expired", "it waits on, past its deadline"
    else:
        assert after.state == "queued", "handed back, and it does not wait"
        assert after.delayed_until == ("future" if step.retry_ms else None), "not when it was asked for"
    assert after.attempt == before.attempt, "handing back changed the attempt"


CHECKS = {
    "submit": _submit,
    "cancel": _cancel,
    "look": _look,
    "beat": _beat,
    "lease": _lease,
    "renew": _renew,
    "publish": _publish,
    "finish": _finish,
    "release": _release,
}
