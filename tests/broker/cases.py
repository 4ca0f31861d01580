"""A call of every script, each in a situation of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from broker import batches, calls, clearing, dead_letters
from broker.calls import Handback, Submitted
from broker.keys import Keys
from broker.loading import leave, note_loading
from broker.queue import Queue
from broker.script import Call
from protocol import Result, encode_terminal
from tests.broker.steps import LONG_MS, MODEL, Worker, beat_at, end, finish_call, job, lapse, put, say, tokens

KEYS = Keys()


@dataclass(frozen=True, slots=True)
class Case:
    """A situation, and a call that is made in it."""

    script: str
    what: str
    prepare: Callable[[Queue], Call[Any]]
    told: Any = None
    """What the caller hears of the same call once more, where that is something else: it must mean the same to it."""


def leased(queue: Queue, job_id: str = "a") -> calls.Lease:
    """A job that runs, with two events logged."""
    put(queue, job_id, run="r")
    lease = Worker(queue).lease_one()
    say(queue, lease, 1, "x", "y")
    return lease


def ended(queue: Queue) -> str:
    """An ended job; its entry in the run's stream."""
    end(queue, leased(queue), 2, "xy")
    client: Any = queue.client
    ((entry, _),) = client.xrange(KEYS.done("r"))
    return str(entry.decode())


def submit(_: Queue) -> Call[Any]:
    return calls.submit(KEYS, job("a", run="r"))


def submit_full(queue: Queue) -> Call[Any]:
    queue.client.hset(KEYS.meta, "max_entries", 1)
    put(queue, "other")
    return calls.submit(KEYS, job("a"))


def submit_conflict(queue: Queue) -> Call[Any]:
    put(queue, "a")
    return calls.submit(KEYS, job("a", prompt="another"))


def lease_new(queue: Queue) -> Call[Any]:
    put(queue, "a", "b", "c")
    return calls.lease(KEYS, "w1", 1, 2, LONG_MS)


def lease_lapsed(queue: Queue) -> Call[Any]:
    lapse(queue, leased(queue).id)
    return calls.lease(KEYS, "w2", 1, 1, LONG_MS)


def lease_marked(queue: Queue) -> Call[Any]:
    lease = leased(queue)
    queue.run(calls.cancel(KEYS, lease.id))
    lapse(queue, lease.id)
    return calls.lease(KEYS, "w2", 1, 1, LONG_MS)


def due(job_id: str, *, overdue: bool) -> Callable[[Queue], Queue]:
    """A job whose time has come, or is over."""

    def prepare(queue: Queue) -> Queue:
        put(queue, job_id, delay_s=3600.0, deadline_in_s=7200.0)
        queue.client.zadd(KEYS.delayed, {job_id: 1})
        if overdue:
            queue.client.hset(KEYS.job(job_id), "deadline", 1)
            queue.client.zadd(KEYS.deadlines, {job_id: 1})
        return queue

    return prepare


def lease_foreign(queue: Queue) -> Call[Any]:
    put(queue, "a")
    queue.client.delete(KEYS.job("a"))
    queue.client.hincrby(KEYS.meta, "entries", -1)
    put(queue, "b")
    return calls.lease(KEYS, "w1", 1, 2, LONG_MS)


def renew(queue: Queue) -> Call[Any]:
    lease = leased(queue)
    return calls.renew(KEYS, "w1", LONG_MS, [(lease.id, lease.attempt), ("nobody", 1)])


def publish(queue: Queue) -> Call[Any]:
    lease = leased(queue)
    return calls.publish(KEYS, lease.worker, lease.id, lease.attempt, 3, tokens(lease, 3, "z", "!"))


def publish_to_a_marked_job(queue: Queue) -> Call[Any]:
    lease = leased(queue)
    queue.run(calls.cancel(KEYS, lease.id))
    return calls.publish(KEYS, lease.worker, lease.id, lease.attempt, 3, tokens(lease, 3, "z"))


def finish(queue: Queue) -> Call[Any]:
    return finish_call(KEYS, leased(queue), 2, "xy")


def finish_unheard(queue: Queue) -> Call[Any]:
    """Of a job that nobody streams, and nothing is logged of."""
    put(queue, "a", run="r", stream=False)
    lease = Worker(queue).lease_one()
    result = Result(id="a", state="failed", attempt=lease.attempt)
    said = encode_terminal("a", 1, lease.attempt, "error", code="engine_error", message="why")
    return calls.finish(KEYS, lease.worker, "a", lease.attempt, "failed", result.encode(), 0, [said])


def finish_dead(queue: Queue) -> Call[Any]:
    return finish_call(KEYS, leased(queue), 2, "xy", state="dead", dead_reason="why")


def finish_as_zombie(queue: Queue) -> Call[Any]:
    lease = leased(queue)
    lapse(queue, lease.id)
    Worker(queue, "w2").lease_one()
    return finish_call(KEYS, lease, 2, "xy")


def release(crashed: bool, retry_in_ms: int = 0) -> Callable[[Queue], Call[Any]]:
    def prepare(queue: Queue) -> Call[Any]:
        lease = leased(queue)
        return calls.release(KEYS, "w1", [Handback(lease.id, lease.attempt, crashed, retry_in_ms)])

    return prepare


def release_marked(queue: Queue) -> Call[Any]:
    lease = leased(queue)
    queue.run(calls.cancel(KEYS, lease.id))
    return calls.release(KEYS, "w1", [Handback(lease.id, lease.attempt)])


def cancel_waiting(queue: Queue) -> Call[Any]:
    put(queue, "a")
    return calls.cancel(KEYS, "a")


def cancel_running(queue: Queue) -> Call[Any]:
    return calls.cancel(KEYS, leased(queue).id)


def clear_waiting(queue: Queue) -> Call[Any]:
    put(queue, "a", "b")
    return clearing.clear(KEYS, clearing.What(), "normal:default", "0")


def clear_running(queue: Queue) -> Call[Any]:
    leased(queue)
    return clearing.clear(KEYS, clearing.What(running=True), "leases", "0")


def heartbeat(queue: Queue) -> Call[Any]:
    queue.run(calls.register(KEYS, "w1", MODEL))
    return calls.heartbeat(KEYS, "w1", {"slots": 4})


def heartbeat_of_a_forgotten_worker(queue: Queue) -> Call[Any]:
    put(queue, "a")
    return calls.heartbeat(KEYS, "w1", {"slots": 4})


def register_another(queue: Queue) -> Call[Any]:
    queue.run(calls.register(KEYS, "w1", MODEL))
    return calls.register(KEYS, "w2", MODEL.model_copy(update={"name": "another"}))


def register_in_place_of_another(queue: Queue) -> Call[Any]:
    """Nobody lives who has the queue's model."""
    queue.run(calls.register(KEYS, "w1", MODEL))
    beat_at(queue, "w1", 2 * calls.ALIVE_MS)
    return calls.register(KEYS, "w2", MODEL.model_copy(update={"name": "another"}))


def dead_letter(queue: Queue) -> str:
    """A dead letter's id."""
    end(queue, leased(queue), 2, "xy", state="dead", dead_reason="why")
    (letter,) = queue.run(dead_letters.dead_list(KEYS, 10))
    return letter.letter


def dead_requeue(queue: Queue) -> Call[Any]:
    return dead_letters.dead_requeue(KEYS, dead_letter(queue), job("a"))


def dead_requeue_of_the_living(queue: Queue) -> Call[Any]:
    letter = dead_letter(queue)
    queue.client.delete(KEYS.job("a"), KEYS.log("a"), KEYS.result("a"))
    put(queue, "a")
    return dead_letters.dead_requeue(KEYS, letter, job("a"))


def pause_ends(queue: Queue) -> Call[Any]:
    queue.run(calls.pause(KEYS, True))
    return calls.pause(KEYS, False)


BATCH = {"input": "in.jsonl", "folder": "b"}


def batch(queue: Queue) -> str:
    """A batch that its first slice works on."""
    queue.run(batches.submit(KEYS, "b", "me", 3600, BATCH))
    return "b"


def batch_advance(queue: Queue) -> Call[Any]:
    return batches.advance(KEYS, batch(queue), 1, "me", "validating", "in_progress", total=7)


def batch_advance_by_another(queue: Queue) -> Call[Any]:
    queue.run(batch_advance(queue))
    return batches.advance(KEYS, "b", 1, "somebody else", "*", "failed")


def batch_note_past_its_window(queue: Queue) -> Call[Any]:
    queue.run(batch_advance(queue))
    queue.client.hset(KEYS.batch("b"), "expires_at", 1)
    return batches.note(KEYS, "b", 2, (1, 2))


CASES = [
    # Both say that the queue has the job.
    Case("submit", "new", submit, told=Submitted("same", "queued")),
    Case("submit", "full", submit_full),
    Case("submit", "conflict", submit_conflict),
    Case("lease", "new", lease_new),
    Case("lease", "lapsed", lease_lapsed),
    Case("lease", "lapsed and marked", lease_marked),
    Case("lease", "due", lambda queue: calls.lease(due("a", overdue=False)(queue).keys, "w1", 1, 1, LONG_MS)),
    Case(
        "lease", "overdue", lambda queue: calls.lease(due("a", overdue=True)(queue).keys, "w1", 1, 1, LONG_MS)
    ),
    Case("lease", "foreign entry", lease_foreign),
    Case("renew", "held and lost", renew),
    Case("publish", "two events", publish),
    Case("publish", "to a marked job", publish_to_a_marked_job),
    Case("finish", "succeeded", finish),
    Case("finish", "nobody streams it", finish_unheard),
    Case("finish", "dead", finish_dead),
    Case("finish", "by a zombie", finish_as_zombie),
    # The number is for the log: what was handed back is no longer held either way.
    Case("release", "in order", release(False), told=0),
    Case("release", "after a crash", release(True), told=0),
    Case("release", "to try again later", release(False, 60_000), told=0),
    Case("release", "a marked job", release_marked, told=0),
    # The job has ended by this cancel, and is said to have.
    Case("cancel", "waiting", cancel_waiting, told=("ended", "cancelled")),
    Case("cancel", "running", cancel_running),
    # What is cancelled or marked by this call is counted by it alone: the numbers are for the screen.
    Case("clear", "waiting", clear_waiting, told=(clearing.Cleared(0, 0), "")),
    Case("clear", "running", clear_running, told=(clearing.Cleared(0, 0), "")),
    Case("heartbeat", "known", heartbeat),
    Case("heartbeat", "forgotten", heartbeat_of_a_forgotten_worker),
    Case("heartbeat", "due", lambda queue: heartbeat(due("a", overdue=False)(queue))),
    Case("heartbeat", "overdue", lambda queue: heartbeat(due("a", overdue=True)(queue))),
    Case("loading", "first", lambda _: note_loading(KEYS, "w1", "m")),
    Case(
        "loading",
        "again",
        lambda queue: (queue.run(note_loading(KEYS, "w1", "m")), note_loading(KEYS, "w1", "m"))[1],
    ),
    Case(
        "leave",
        "one that loads",
        lambda queue: (queue.run(note_loading(KEYS, "w1", "m")), leave(KEYS, "w1"))[1],
    ),
    Case("register", "first", lambda _: calls.register(KEYS, "w1", MODEL)),
    Case("register", "another model", register_another),
    Case("register", "in place of another model", register_in_place_of_another),
    # The number is nobody's concern: the jobs are gone either way.
    Case("forget", "ended", lambda queue: calls.forget(KEYS, "r", [("a", ended(queue))]), told=0),
    Case("dead_list", "one", lambda queue: (dead_letter(queue), dead_letters.dead_list(KEYS, 10))[1]),
    Case("dead_show", "one", lambda queue: dead_letters.dead_show(KEYS, dead_letter(queue))),
    Case("dead_requeue", "dead", dead_requeue),
    Case("dead_requeue", "alive again", dead_requeue_of_the_living),
    # The number is for the screen: the letters are gone either way.
    Case("dead_purge", "one", lambda queue: dead_letters.dead_purge(KEYS, [dead_letter(queue)]), told=0),
    Case(
        "dead_purge",
        "all",
        lambda queue: dead_letters.dead_purge(KEYS, (dead_letter(queue), None)[1]),
        told=0,
    ),
    Case("batch_submit", "new", lambda _: batches.submit(KEYS, "b", "me", 3600, BATCH)),
    Case(
        "batch_submit",
        "another's",
        lambda queue: batches.submit(KEYS, batch(queue), "somebody else", 3600, BATCH),
    ),
    Case("batch_advance", "a slice ends", batch_advance),
    Case("batch_advance", "a slice that was replaced", batch_advance_by_another),
    Case("batch_note", "under way", lambda queue: batches.note(KEYS, batch(queue), 1, (1, 2))),
    Case("batch_note", "held up", lambda queue: batches.note(KEYS, batch(queue), 1, why="no room")),
    Case("batch_note", "past its window", batch_note_past_its_window),
    Case("batch_cancel", "under way", lambda queue: batches.cancel(KEYS, batch(queue))),
    Case("batch_cancel", "unknown", lambda _: batches.cancel(KEYS, "nobody")),
    Case("pause", "begins", lambda _: calls.pause(KEYS, True)),
    Case("pause", "ends", pause_ends),
    Case("limits", "set", lambda _: calls.limits(KEYS, 10, 1000)),
    Case("weight", "set", lambda _: calls.weights(KEYS, "t", 2.0)),
    Case("look", "running", lambda queue: calls.look(KEYS, leased(queue).id)),
    Case("status", "running", lambda queue: (leased(queue), calls.status(KEYS))[1]),
]
