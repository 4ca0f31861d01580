"""The books of a chaos run: what is known of each job at its end, compared with the undisturbed run.

lost       accepted, and not ended or not announced; or told to be unknown
doubled    an event, a text, an end or an announcement that is there twice
torn       a stream with a gap, without its end, or with another text than the result
changed    a result that is not what the undisturbed run gave, or times that are not what was asked for
near tie   changed from a token on where the undisturbed run's two likeliest were less than `NEAR` apart
leaked     a key that stays when every job has been collected, or a count that is not 0
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from bench.chaos_jobs import Expected, Plan, Watch
from broker.watch import AnyEvent
from protocol import Choice, Result, State, TokenEvent, TokenLogprob

FaultKind = Literal["lost", "doubled", "torn", "changed", "near tie", "leaked", "stray"]
FAULT_KINDS: tuple[FaultKind, ...] = ("lost", "doubled", "torn", "changed", "leaked", "stray")
NEAR = 1e-3
"""Nats. Which of two tokens so close comes first is up to the order of additions, in any batch."""
LOGPROB_TOLERANCE = 1e-2
"""Nats; float32 in another batch."""
ROUNDING_S = 0.002
"""The server counts in whole milliseconds."""
_TYPE_OF_STATE = {"succeeded": "done", "failed": "error"}
"""The terminal event of a state; the others have the state's name."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is not as promised."""

    kind: FaultKind
    job_id: str
    what: str


@dataclass(slots=True)
class Stream:
    """What one watcher saw, or what the log holds."""

    job_id: str
    watch: Watch | Literal["log"]
    events: list[AnyEvent] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """Seconds since the run began, one an event; none for a log."""
    is_whole: bool = False
    """It was followed to its end; else its watcher left, or was cut off for good and began again."""
    complaint: str = ""
    """What the client library said that it should not have."""


@dataclass(frozen=True, slots=True)
class Times:
    """When a job was submitted, and which times the server keeps of it, in seconds since the epoch.

    Its people's clock and the server's are one machine's.
    """

    sent: float
    accepted: float
    not_before: float | None = None
    deadline: float | None = None


@dataclass(slots=True)
class Account:
    """All that is known of one accepted job."""

    plan: Plan
    expected: Expected
    state: State | None
    result: Result | None
    ends: list[str]
    """States in which it was announced as ended."""
    streams: list[Stream]
    times: Times
    cancel_answer: str | None = None
    """What a cancel of it was answered; None without one."""

    @property
    def id(self) -> str:
        """The job's id."""
        return self.plan.id


def judge(account: Account) -> list[Fault]:
    """Everything that is wrong with one job."""
    faults = _end_faults(account)
    for stream in account.streams:
        if _needs_no_log(account, stream):
            continue
        faults += _order_faults(stream)
        if account.result is not None:
            faults += _text_faults(stream, account.result)
    if account.result is not None:
        faults += _result_faults(account, account.result)
        faults += _time_faults(account, account.result)
    return faults


def _needs_no_log(account: Account, stream: Stream) -> bool:
    """Whether this is the log of a job that nobody streams and that ended before anything of it was logged."""
    return stream.watch == "log" and not account.plan.job.stream and not stream.events


def _end_faults(account: Account) -> list[Fault]:
    """It ended, and was said to have ended once."""
    if account.result is None:
        return [Fault("lost", account.id, f"no result; its state is {account.state}")]
    if not account.ends:
        return [Fault("lost", account.id, "its end was never announced")]
    if account.ends != [account.result.state]:
        kind: FaultKind = "doubled" if len(account.ends) > 1 else "torn"
        said = ", ".join(account.ends)
        return [Fault(kind, account.id, f"announced as {said}; the result says {account.result.state}")]
    return []


# -- streams ---------------------------------------------------------------------------------------------------


def _order_faults(stream: Stream) -> list[Fault]:
    """Events follow each other without gap or repeat, up to one end."""
    found: list[Fault] = []

    def fault(kind: FaultKind, what: str) -> None:
        found.append(Fault(kind, stream.job_id, f"{stream.watch} stream: {what}"))

    seen = attempt = 0
    finished: set[int] = set()
    ended = False
    for event in stream.events:
        if ended:
            fault("doubled", f"event {event.seq} after the end")
        if event.seq <= seen:
            fault("doubled", f"event {event.seq} after event {seen}")
        elif event.seq > seen + 1:
            fault("torn", f"event {event.seq} after event {seen}")
        if event.attempt < attempt:
            fault("torn", f"event {event.seq} is of attempt {event.attempt}, after one of attempt {attempt}")
        seen, attempt = max(seen, event.seq), max(attempt, event.attempt)
        if not isinstance(event, TokenEvent):
            ended = True
            continue
        if event.choice in finished:
            fault("doubled", f"event {event.seq} goes on with choice {event.choice}, which had ended")
        if event.finish_reason is not None:
            finished.add(event.choice)
    if stream.complaint:
        fault("lost" if "not found" in stream.complaint else "torn", stream.complaint)
    elif stream.is_whole and not ended:
        fault("torn", f"nothing after event {seen}, which is no end")
    return found


def _text_faults(stream: Stream, result: Result) -> list[Fault]:
    """A whole stream is the result's text, any other one its beginning."""
    found = []
    for choice in _joined(stream.events, len(result.choices)):
        stored = next((one for one in result.choices if one.index == choice.index), None)
        where = f"{stream.watch} stream: choice {choice.index}"
        if stored is None:
            found.append(Fault("torn", stream.job_id, f"{where} is not in the result"))
        elif not _begins(stored, choice):
            found.append(
                Fault("torn", stream.job_id, f"{where}: {choice.text!r}; the result has {stored.text!r}")
            )
        elif stream.is_whole and len(choice.token_ids) < len(stored.token_ids):
            missing = len(stored.token_ids) - len(choice.token_ids)
            found.append(
                Fault("torn", stream.job_id, f"{where} lacks the last {missing} tokens of the result")
            )
        elif stream.is_whole and choice.text != stored.text:
            found.append(Fault("torn", stream.job_id, f"{where} lacks the end of the result's text"))
    ends = [event.type for event in stream.events if not isinstance(event, TokenEvent)]
    right = _TYPE_OF_STATE.get(result.state, result.state)
    if ends and ends[-1] != right:
        found.append(Fault("torn", stream.job_id, f"{stream.watch} stream ends with {ends[-1]}, not {right}"))
    return found


def _joined(events: Iterable[AnyEvent], at_least: int) -> list[Choice]:
    """The choices that a stream's events add up to."""
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    count = max([at_least - 1, *(event.choice for event in tokens)]) + 1
    return [
        Choice(
            index=index,
            text="".join(event.text for event in tokens if event.choice == index),
            token_ids=[token for event in tokens if event.choice == index for token in event.token_ids],
        )
        for index in range(count)
    ]


def _begins(whole: Choice, part: Choice) -> bool:
    return whole.text.startswith(part.text) and whole.token_ids[: len(part.token_ids)] == part.token_ids


@dataclass(frozen=True, slots=True)
class Pause:
    """How long somebody who watched live heard nothing, between two events of a job."""

    seconds: float
    job_id: str
    after_seq: int
    at: float
    """When it began, in seconds since the run began."""


def longest_pause(streams: Iterable[Stream]) -> Pause | None:
    """The longest of all; None where nobody heard two events."""
    pauses = (
        Pause(later - earlier, stream.job_id, event.seq, earlier)
        for stream in streams
        if stream.watch == "live"
        for (earlier, later), event in zip(pairwise(stream.arrivals), stream.events, strict=False)
    )
    return max(pauses, key=lambda pause: pause.seconds, default=None)


# -- results ---------------------------------------------------------------------------------------------------


def _result_faults(account: Account, result: Result) -> list[Fault]:
    """It ended as it may, and says what the undisturbed run says: all of it, or the beginning of it."""
    if not _may_end_so(account, result):
        error = f" ({result.error.code}: {result.error.message})" if result.error else ""
        what = f"ended as {result.state}{error}, not as {account.expected.state}"
        return [Fault("changed", account.id, what)]
    expected = account.expected
    is_whole = result.state == "succeeded"
    if is_whole and [choice.index for choice in result.choices] != list(range(len(expected.choices))):
        return [Fault("changed", account.id, f"{len(result.choices)} choices, not {len(expected.choices)}")]
    found = []
    for choice in result.choices:
        want = (
            expected.choices[choice.index]
            if choice.index < len(expected.choices)
            else Choice(text="", token_ids=[])
        )
        margins = expected.margins[choice.index] if choice.index < len(expected.margins) else []
        found += _choice_faults(account.id, choice, want, margins, is_whole)
    if is_whole and not found and result.usage != expected.usage:
        found.append(Fault("changed", account.id, f"usage {result.usage}, not {expected.usage}"))
    return found


def _may_end_so(account: Account, result: Result) -> bool:
    code = result.error.code if result.error is not None else None
    job = account.plan.job
    if result.state == "cancelled":
        return account.plan.cancel_after_s is not None
    if result.state == "expired":
        return job.deadline_in_s is not None
    if code == "device_error":
        return result.state == "failed" and job.max_retries == 0
    return (result.state, code) == (account.expected.state, account.expected.code)


def _time_faults(account: Account, result: Result) -> list[Fault]:
    """It started neither before its time nor after its deadline, did not expire before it, and a cancel held."""
    job, times, found = account.plan.job, account.times, []
    if account.cancel_answer == "cancelled" and result.state != "cancelled":
        found.append(f"a cancel was answered 'cancelled', and it ended as {result.state}")
    found += _kept_faults("time to start", job.delay_s, times.not_before, times)
    found += _kept_faults("deadline", job.deadline_in_s, times.deadline, times)
    early, late = times.not_before or times.sent, times.deadline or math.inf
    if result.started_at is not None and not early - ROUNDING_S <= result.started_at <= late + ROUNDING_S:
        found.append(f"it started at {result.started_at:.3f}, and may from {early:.3f} to {late:.3f}")
    if result.state == "expired" and (result.finished_at or 0.0) < late - ROUNDING_S:
        found.append(f"it expired at {result.finished_at}, before its deadline {late:.3f}")
    return [Fault("changed", account.id, what) for what in found]


def _kept_faults(name: str, after_s: float | None, kept: float | None, times: Times) -> list[str]:
    """What is wrong with a time that the server keeps of a job; it was asked for as seconds after the submission."""
    if after_s is None or kept is None:
        return [] if after_s == kept else [f"its {name} is kept as {kept}, and {after_s} s were asked for"]
    early, late = times.sent + after_s, times.accepted + after_s
    if early - ROUNDING_S <= kept <= late + ROUNDING_S:
        return []
    return [f"its {name} is kept as {kept:.3f}, and is between {early:.3f} and {late:.3f}"]


def _choice_faults(
    job_id: str, choice: Choice, want: Choice, margins: Sequence[float], is_whole: bool
) -> list[Fault]:
    where = f"choice {choice.index}"
    if (place := _first_difference(choice.token_ids, want.token_ids, is_whole)) is not None:
        margin = margins[place] if place < len(margins) else float("inf")
        kind: FaultKind = "near tie" if margin < NEAR else "changed"
        got, right = choice.token_ids[place : place + 4], want.token_ids[place : place + 4]
        return [Fault(kind, job_id, f"{where}: {got} at token {place}, not {right}; margin {margin:.2g}")]
    if choice.text != want.text if is_whole else not want.text.startswith(choice.text):
        return [Fault("changed", job_id, f"{where}: text {choice.text!r}, not {want.text!r}")]
    ends, right_ends = (choice.finish_reason, choice.stop_reason), (want.finish_reason, want.stop_reason)
    if is_whole and ends != right_ends:
        return [Fault("changed", job_id, f"{where}: ended by {ends}, not {right_ends}")]
    if not _logprobs_agree(choice.logprobs, want.logprobs, is_whole):
        return [
            Fault("changed", job_id, f"{where}: log-probabilities {choice.logprobs}, not {want.logprobs}")
        ]
    return []


def _first_difference(got: Sequence[int], want: Sequence[int], is_whole: bool) -> int | None:
    """Where two lists of ids part; None where they are equal, or the first is a beginning that may be one."""
    for place, (one, other) in enumerate(zip(got, want, strict=False)):
        if one != other:
            return place
    if len(got) == len(want) or (not is_whole and len(got) < len(want)):
        return None
    return min(len(got), len(want))


def _logprobs_agree(got: list[TokenLogprob] | None, want: list[TokenLogprob] | None, is_whole: bool) -> bool:
    if got is None or want is None:
        return not is_whole or got is want
    pairs = zip(got, want, strict=False)
    return (len(got) == len(want) or not is_whole) and all(
        one["token_id"] == other["token_id"] and abs(one["logprob"] - other["logprob"]) < LOGPROB_TOLERANCE
        for one, other in pairs
    )
