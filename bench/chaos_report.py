"""What a chaos run has found: tables as Markdown, and the history of each job that something is wrong with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from bench import results
from bench.chaos_books import FAULT_KINDS, Account, Fault, longest_pause
from bench.chaos_clients import People
from bench.chaos_disturbances import Schedule
from bench.chaos_processes import Fleet
from bench.chaos_referee import Referee

MOST_TOLD = 40
"""Faults and histories that are printed; the counts are always whole."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One part's books, and where their background can be looked up."""

    part: str
    setting: str
    """Server, workers and seed, in words."""
    jobs: int
    """That were to be submitted."""
    accounts: list[Account]
    faults: list[Fault]
    referee: Referee
    people: People
    schedule: Schedule
    fleet: Fleet
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong, nothing was left out, and every kind of disturbance took place."""
        wrong = any(fault.kind != "near tie" for fault in self.faults)
        return not wrong and not self.never_happened and len(self.accounts) == self.jobs

    @property
    def never_happened(self) -> list[str]:
        """Kinds of disturbance that this run says nothing about."""
        counts = self.schedule.counts | self.told
        return [kind for kind, count in counts.items() if not count]

    @property
    def told(self) -> dict[str, int]:
        """How many jobs there were of each kind that is a disturbance by itself."""
        plans = [account.plan for account in self.accounts]
        watches = Counter(plan.watch for plan in plans if plan.watch is not None)
        resumed = sum(account.result is not None and account.result.attempt > 1 for account in self.accounts)
        kinds = {
            "jobs cancelled": len(self.people.cancelled),
            "jobs with a deadline": sum(plan.job.deadline_in_s is not None for plan in plans),
            "jobs delayed": sum(plan.job.delay_s is not None for plan in plans),
            "jobs of more than one choice": sum(plan.job.num_choices > 1 for plan in plans),
            "jobs that went through several hands": resumed,
            **{f"watchers: {kind}": number for kind, number in sorted(watches.items())},
        }
        if any(plan.is_poison for plan in plans):
            kinds["poison jobs"] = sum(plan.is_poison for plan in plans)
            kinds["retries of errors that can pass"] = len(self.fleet.lines_with(": tried again in "))
        return kinds


def tables(outcome: Outcome) -> str:
    """Books, ends and disturbances."""
    counts = Counter(fault.kind for fault in outcome.faults)
    pause = longest_pause(outcome.people.streams)
    watched = sum(account.plan.watch is not None for account in outcome.accounts)
    head = ["jobs", "watched", *FAULT_KINDS, "near ties", "longest pause, s", "seconds"]
    row = [
        f"{len(outcome.accounts):,}",
        f"{watched:,}",
        *(str(counts[kind]) for kind in FAULT_KINDS),
        str(counts["near tie"]),
        "-" if pause is None else f"{pause.seconds:.1f}",
        f"{outcome.seconds:.0f}",
    ]
    parts = [outcome.setting, results.table(head, [row]), _table("ended as", _ends(outcome.accounts))]
    parts.append(_table("disturbance", (outcome.schedule.counts | outcome.told).items()))
    if outcome.never_happened:
        parts.append(f"Never happened: {', '.join(outcome.never_happened)}.")
    if left_out := outcome.jobs - len(outcome.accounts):
        parts.append(f"Left out, for lack of time: {left_out:,} jobs.")
    return "\n\n".join(parts)


def _ends(accounts: Iterable[Account]) -> list[tuple[str, int]]:
    def end(account: Account) -> str:
        if account.result is None:
            return "nothing"
        error = account.result.error
        return account.result.state if error is None else f"{account.result.state}: {error.code}"

    return sorted(Counter(map(end, accounts)).items())


def _table(name: str, counts: Iterable[tuple[str, int]]) -> str:
    return results.table([name, "times"], [[what, f"{count:,}"] for what, count in counts])


def histories(outcome: Outcome) -> str:
    """Each fault, what became of its job, and how the longest pause came about."""
    lines = [f"{fault.kind}: {fault.job_id}: {fault.what}" for fault in outcome.faults[:MOST_TOLD]]
    if more := len(outcome.faults) - MOST_TOLD:
        lines += [f"and {more} faults more"] if more > 0 else []
    accounts = {account.id: account for account in outcome.accounts}
    for job_id in dict.fromkeys(fault.job_id for fault in outcome.faults[:MOST_TOLD]):
        if job_id in accounts:
            lines += ["", *_history(outcome, accounts[job_id])]
    if (pause := longest_pause(outcome.people.streams)) is not None:
        lines.append(
            f"\nThe longest pause, {pause.seconds:.1f} s from {pause.at:.1f} s on, after event {pause.after_seq}:"
        )
        lines += _history(outcome, accounts[pause.job_id])
    return "\n".join(lines)


def _history(outcome: Outcome, account: Account) -> Iterable[str]:
    """Who asked for what, what the log has, what workers said, and what was being done to them."""
    plan, result = account.plan, account.result
    accepted = outcome.people.accepted[account.id]
    yield f"{account.id}: accepted at {accepted:.1f} s; {plan.job.encode().decode()}"
    if plan.cancel_after_s is not None:
        yield f"  cancelled {plan.cancel_after_s:.1f} s later: {outcome.people.cancelled.get(account.id)}"
    for stream in account.streams:
        spans = [
            (attempt, list(events)) for attempt, events in groupby(stream.events, lambda one: one.attempt)
        ]
        told = ", ".join(
            f"{events[0].seq} to {events[-1].seq} of attempt {attempt}" for attempt, events in spans
        )
        yield f"  {stream.watch} stream{'' if stream.is_whole else ', cut short'}: events {told or 'none'}"
    if result is not None:
        yield f"  {result.state}, attempt {result.attempt}, by {result.worker}, {result.error or 'no error'}"
    yield from (f"  {line}" for line in outcome.fleet.lines_with(f"job {account.id} "))
    ended = outcome.referee.ended_at.get(account.id, float("inf"))
    for happening in outcome.schedule.happened:
        if happening.at > ended or happening.at + happening.seconds < accepted:
            continue
        yield f"  {happening.at:7.1f} s for {happening.seconds:.1f} s: {happening.kind}: {happening.target}"
