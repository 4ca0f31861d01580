"""Random stories of jobs, workers and zombies: whatever happens, every job ends once and leaves nothing behind."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from broker import calls, dead_letters
from broker.calls import Call, Lease
from broker.keys import Keys
from broker.queue import Queue
from protocol import PRIORITIES, TERMINAL_STATES, Job, decode_event
from tests.broker.steps import (
    TERMINAL_EVENT,
    Worker,
    assert_drained,
    assert_ended_once,
    counts,
    end,
    finish_call,
    ids_of,
    job,
    key_names,
    lapse,
    say,
    snapshot,
    stored_result,
    tokens,
)

KEYS = Keys()
JOBS = 10


@dataclass
class Known:
    """What must hold of one job."""

    size: int
    state: str = "queued"
    attempt: int = 0
    marked: bool = False
    logged: int = 0
    result: bytes | None = None
    delayed: bool = False
    deadline: bool = False
    overdue: bool = False
    retries: int = 0


@dataclass
class Held:
    """A lease as its worker remembers it, long after it was lost too."""

    lease: Lease
    logged: int


@dataclass
class Told:
    """A worker with everything it ever leased."""

    worker: Worker
    held: list[Held] = field(default_factory=list)


def text_of(logged: int) -> str:
    return "".join(f"{seq} " for seq in range(1, logged + 1))


class Story:
    """Jobs are submitted, leased, lost and taken over by three workers, none of which ever forgets a lease."""

    def __init__(self, queue: Queue, seed: int) -> None:
        self.queue = queue
        self.dice = random.Random(seed)
        self.jobs: dict[str, Known] = {}
        self.workers = [Told(Worker(queue, name)) for name in ("w1", "w2", "w3")]
        self.last: Call[Any] | None = None
        self.told: list[str] = []

    def tell(self, steps: int) -> None:
        happens = {
            self.submit: 3,
            self.lease: 4,
            self.publish: 6,
            self.finish: 2,
            self.release: 1,
            self.renew: 1,
            self.cancel: 1,
            self.requeue: 1,
            self.expire: 0.5,
            self.time_passes: 3,
            self.forget_scripts: 0.3,
            self.repeat: 4,
        }
        for step in self.dice.choices([*happens], [*happens.values()], k=steps):
            self.told.append(step.__name__)
            step()
            self.check()
        self.close()

    def run(self, call: Call[Any]) -> Any:
        self.last = call
        return self.queue.run(call)

    # -- what may happen -----------------------------------------------------------------------------------------

    def submit(self) -> None:
        """One of a few jobs: a new one, or one that is there already."""
        dice = self.dice
        asked = job(
            f"j{dice.randrange(JOBS)}",
            priority=dice.choice(PRIORITIES),
            tenant=dice.choice("ab"),
            run=dice.choice([None, "r"]),
            delay_s=dice.choice([None, None, 1000.0]),
            deadline_in_s=dice.choice([None, 2000.0]),
        )
        answer = self.run(calls.submit(KEYS, asked))
        if asked.id in self.jobs:
            assert answer.outcome in ("same", "conflict")
            assert answer.state == self.jobs[asked.id].state
        else:
            assert answer.outcome == "queued"
            delayed, deadline = asked.delay_s is not None, asked.deadline_in_s is not None
            self.jobs[asked.id] = Known(len(asked.encode()), delayed=delayed, deadline=deadline)

    def lease(self) -> None:
        told, count = self.dice.choice(self.workers), self.dice.randint(1, 3)
        told.worker.requests += 1
        call = calls.lease(KEYS, told.worker.name, told.worker.requests, count, 60_000)
        leases: list[Lease] = self.run(call).leases
        assert len(set(ids_of(leases))) == len(leases) <= count
        for lease in leases:
            known = self.jobs[lease.id]
            assert known.state not in TERMINAL_STATES
            assert not known.delayed
            expected = (known.attempt + 1, known.logged, known.retries)
            assert (lease.attempt, lease.logged, lease.retries) == expected
            known.state, known.attempt = "running", lease.attempt
            told.held.append(Held(lease, lease.logged))
        self.note_cancelled()

    def publish(self) -> None:
        _, held = self.any_held()
        if held is None:
            return
        first, count = held.logged + 1, self.dice.randint(1, 3)
        events = tokens(held.lease, first, *(f"{seq} " for seq in range(first, first + count)))
        answer = self.run(
            calls.publish(KEYS, held.lease.worker, held.lease.id, held.lease.attempt, first, events)
        )
        known = self.jobs[held.lease.id]
        if self.owns(held):
            assert answer.outcome == ("cancel" if known.marked else "ok")
            held.logged = known.logged = answer.logged
        else:
            assert answer.outcome == "lost"

    def finish(self) -> None:
        _, held = self.any_held()
        if held is None:
            return
        state: Any = self.dice.choice(sorted(TERMINAL_EVENT))
        reason = "why" if state == "dead" else ""
        owned, known = self.owns(held), self.jobs[held.lease.id]
        answer = self.run(finish_call(KEYS, held.lease, held.logged, text_of(held.logged), state, reason))
        if owned:
            assert answer == "ok"
            known.state = state
            known.logged += 1
        else:
            repeated = (known.state, known.attempt) == (state, held.lease.attempt)
            assert answer == ("ok" if repeated else "lost")

    def release(self) -> None:
        worker, held = self.any_held()
        if held is None:
            return
        owned, known = self.owns(held), self.jobs[held.lease.id]
        crashed, retry_in_ms = self.dice.choice([(False, 0), (True, 0), (False, 1000_000)])
        handed = calls.Handback(held.lease.id, held.lease.attempt, crashed, retry_in_ms)
        assert self.run(calls.release(KEYS, worker.name, [handed])) == int(owned)
        if owned and not known.marked:
            known.state = "queued"
            known.delayed = retry_in_ms > 0
            known.retries += known.delayed
        self.note_cancelled()

    def requeue(self) -> None:
        """A dead job gets another life; the others have no letter."""
        job_id = f"j{self.dice.randrange(JOBS)}"
        letter = self.queue.run(dead_letters.dead_show(KEYS, job_id))
        known = self.jobs.get(job_id)
        assert (letter is not None) == (known is not None and known.state == "dead")
        if letter is None or known is None:
            return
        asked = Job.decode(letter.raw or b"")
        assert self.run(dead_letters.dead_requeue(KEYS, letter.letter, asked)).outcome == "queued"
        again = Known(known.size, attempt=known.attempt, deadline=asked.deadline_in_s is not None)
        again.delayed = asked.delay_s is not None
        self.jobs[job_id] = again

    def expire(self) -> None:
        """The deadline of a job passes: it ends at once where nobody runs it, else it is its owner's to stop."""
        job_id = f"j{self.dice.randrange(JOBS)}"
        known = self.jobs.get(job_id)
        if known is None or not known.deadline or known.state in TERMINAL_STATES:
            return
        server: Any = self.queue.client
        server.hset(KEYS.job(job_id), "deadline", 1)
        known.overdue = True
        self.run(calls.look(KEYS, job_id))
        self.note_cancelled()

    def renew(self) -> None:
        told = self.dice.choice(self.workers)
        pairs = [(held.lease.id, held.lease.attempt) for held in told.held]
        expected = [
            ("cancel" if self.jobs[held.lease.id].marked else "held") if self.owns(held) else "lost"
            for held in told.held
        ]
        assert self.run(calls.renew(KEYS, told.worker.name, 60_000, pairs)) == expected

    def cancel(self) -> None:
        job_id = f"j{self.dice.randrange(JOBS)}"
        answer, state = self.run(calls.cancel(KEYS, job_id))
        known = self.jobs.get(job_id)
        if known is None:
            assert answer == "unknown"
        elif known.state in TERMINAL_STATES:
            assert (answer, state) == ("ended", known.state)
        else:
            assert answer == "cancelled" or (answer, known.state) == ("cancelling", "running")
            known.marked = True
        self.note_cancelled()

    def time_passes(self) -> None:
        """The lease of a running job lapses, and its worker does not know; the time of a waiting one comes."""
        delayed = [job_id for job_id, known in self.jobs.items() if known.delayed]
        if delayed and self.dice.random() < 0.5:
            self.comes_due(self.dice.choice(delayed))
        running = [job_id for job_id, known in self.jobs.items() if known.state == "running"]
        if running:
            lapse(self.queue, self.dice.choice(running))
            self.last = None  # a repetition comes within the time of a lease

    def comes_due(self, *ids: str) -> None:
        server: Any = self.queue.client
        if ids:
            server.zadd(KEYS.delayed, dict.fromkeys(ids, 1), xx=True)
        for job_id in ids:
            self.jobs[job_id].delayed = False
        self.last = None

    def forget_scripts(self) -> None:
        client: Any = self.queue.client
        client.script_flush()

    def repeat(self) -> None:
        """The reply of the last call was lost: the same call once more changes nothing."""
        if self.last is not None:
            before = self.without_times()
            self.queue.run(self.last)
            assert self.without_times() == before

    # -- what must hold ------------------------------------------------------------------------------------------

    def check(self) -> None:
        with self.queue.client.pipeline(transaction=False) as pipe:
            for job_id in self.jobs:
                pipe.lrange(KEYS.log(job_id), 0, -1)
            logs: list[Any] = pipe.execute()
        for (job_id, known), log in zip(self.jobs.items(), logs, strict=True):
            events: list[Any] = [decode_event(raw) for raw in log]
            assert [event.seq for event in events] == list(range(1, known.logged + 1))
            said = [event for event in events if event.type == "token"]
            assert [event.text for event in said] == [f"{event.seq} " for event in said]
            result = stored_result(self.queue, job_id)
            assert (result is not None) == (known.state in TERMINAL_STATES)
            assert known.result in (None, result)
            known.result = result
        live = [known for known in self.jobs.values() if known.state not in TERMINAL_STATES]
        assert counts(self.queue) == (len(live), sum(known.size for known in live))

    def close(self) -> None:
        """A last worker ends what is left, and then nothing is."""
        last = Worker(self.queue, "last")
        if self.jobs:
            lapse(self.queue, *self.jobs)
        self.comes_due(*self.jobs)
        for lease in last.lease(JOBS + 1):
            say(self.queue, lease, lease.logged + 1, f"{lease.logged + 1} ")
            assert end(self.queue, lease, lease.logged + 1, text_of(lease.logged + 1)) == "ok"
            self.jobs[lease.id].state = "succeeded"
        self.note_cancelled()
        for job_id, known in self.jobs.items():
            assert_ended_once(self.queue, job_id, known.state)
        assert last.lease(5) == []
        assert_drained(self.queue)
        of_live_jobs = tuple(
            KEYS.base + kind for kind in ("jobs:", "tenants:", "leases", "delayed", "deadlines")
        )
        assert not [name for name in key_names(self.queue) if name.startswith(of_live_jobs)]

    # -- what the story knows ------------------------------------------------------------------------------------

    def any_held(self) -> tuple[Worker, Held | None]:
        """A lease that some worker has or once had."""
        told = self.dice.choice(self.workers)
        return told.worker, self.dice.choice(told.held[-4:]) if told.held else None

    def owns(self, held: Held) -> bool:
        known = self.jobs[held.lease.id]
        return known.state == "running" and known.attempt == held.lease.attempt

    def note_cancelled(self) -> None:
        """A marked or overdue job that nobody runs may have been ended by the last call; no other may."""
        looks = self.queue.run_all([calls.look(KEYS, job_id) for job_id in self.jobs])
        for known, state in zip(self.jobs.values(), (look.state for look in looks), strict=True):
            if state in ("cancelled", "expired") and known.state != state:
                assert known.marked if state == "cancelled" else known.overdue
                known.state = state
                known.delayed = False
                known.logged += 1

    def without_times(self) -> dict[bytes, Any]:
        held = snapshot(self.queue)
        held[b"leased"] = sorted(name for name, _ in held.pop(KEYS.leases.encode(), []))
        return held


def tell(queue: Queue, seed: int, steps: int) -> None:
    story = Story(queue, seed)
    try:
        story.tell(steps)
    except AssertionError as error:
        error.add_note(f"seed {seed}, after: {' '.join(story.told)}")
        raise


@pytest.mark.parametrize("seed", range(5))
def test_every_job_ends_once(queue: Queue, seed: int) -> None:
    tell(queue, seed, steps=120)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 112))
def test_every_job_ends_once_in_long_stories(queue: Queue, seed: int) -> None:
    tell(queue, seed, steps=600)
