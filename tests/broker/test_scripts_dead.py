"""Dead letters: listed, shown, given another life, purged."""

from __future__ import annotations

import itertools
import json
from typing import Any

import fakeredis

from broker import calls, dead_letters
from broker.dead_letters import DeadLetter
from broker.keys import Keys
from broker.queue import Queue
from protocol import Job
from tests.broker.steps import (
    Worker,
    assert_drained,
    assert_ended_once,
    end,
    events_of,
    ids_of,
    key_names,
    put,
    say,
    snapshot,
    told,
)

KEYS = Keys()
NUMBERS = itertools.count()


def die(queue: Queue, job_id: str = "a", reason: str = "crashed_worker") -> None:
    """The job waits alone in the queue; it runs, writes a token and is convicted."""
    lease = Worker(queue, f"killed-{next(NUMBERS)}").lease_one()
    assert lease.id == job_id
    say(queue, lease, lease.logged + 1, "x")
    assert end(queue, lease, lease.logged + 1, "x", state="dead", dead_reason=reason) == "ok"


def dead_jobs(queue: Queue, *ids: str, **fields: Any) -> None:
    for job_id in ids:
        put(queue, job_id, **fields)
        die(queue, job_id)


def letters(queue: Queue, count: int = 100, after: str = "") -> list[DeadLetter]:
    return queue.run(dead_letters.dead_list(KEYS, count, after))


def show(queue: Queue, name: str) -> DeadLetter | None:
    return queue.run(dead_letters.dead_show(KEYS, name))


def requeue_call(queue: Queue, name: str = "a") -> calls.Call[dead_letters.Requeued]:
    letter = show(queue, name)
    assert letter is not None
    return dead_letters.dead_requeue(KEYS, letter.letter, Job.decode(letter.raw or b""))


def requeue(queue: Queue, name: str = "a") -> str:
    return queue.run(requeue_call(queue, name)).outcome


# -- looking ---------------------------------------------------------------------------------------------------


def test_letters_are_listed_in_order_and_in_pages(queue: Queue) -> None:
    names = [f"j{n}" for n in range(5)]
    number = next(NUMBERS) + 1
    dead_jobs(queue, *names)
    pages = [letters(queue, 2)]
    while pages[-1]:
        pages.append(letters(queue, 2, pages[-1][-1].letter))
    assert [letter.job_id for page in pages for letter in page] == names
    first = pages[0][0]
    assert (first.reason, first.attempt, first.worker) == ("crashed_worker", 1, f"killed-{number}")
    assert (first.size, first.raw) == (len(Job(id="j0", prompt="p").encode()), None)


def test_a_letter_is_shown_by_its_id_and_by_its_jobs(queue: Queue) -> None:
    dead_jobs(queue, "a")
    by_job = show(queue, "a")
    assert by_job is not None
    assert by_job.raw == Job(id="a", prompt="p").encode()
    assert show(queue, by_job.letter) == by_job


def test_there_is_no_letter_of_other_names(queue: Queue) -> None:
    dead_jobs(queue, "a")
    put(queue, "ended")
    end(queue, Worker(queue).lease_one())
    put(queue, "alive")
    names = ["nobody", "1-1", "99999999999999999999999-1", "alive", "ended", ""]
    assert [show(queue, name) for name in names] == [None] * 6
    assert queue.run(dead_letters.dead_purge(KEYS, names)) == 0
    assert len(letters(queue)) == 1


def test_large_letters_come_in_small_pages(queue: Queue) -> None:
    client: Any = queue.client
    for n in range(7):
        client.xadd(KEYS.dead, {"id": f"j{n}", "reason": "why", "raw": "x" * (4 << 20)})
    first = letters(queue)
    assert len(first) == 4
    assert len(letters(queue, after=first[-1].letter)) == 3


# -- another life ----------------------------------------------------------------------------------------------


def test_a_requeued_job_starts_from_its_prompt_under_attempts_that_go_on(queue: Queue) -> None:
    put(queue, "a", priority="high", tenant="t", run="r")
    worker = Worker(queue)
    queue.run(calls.release(KEYS, "w1", [calls.Handback("a", worker.lease_one().attempt, crashed=True)]))
    queue.run(calls.release(KEYS, "w1", [calls.Handback("a", worker.lease_one().attempt, retry_in_ms=1)]))
    queue.client.zadd(KEYS.delayed, {"a": 1})
    zombie = worker.lease_one()
    say(queue, zombie, 1, "old ")
    end(queue, zombie, 1, "old ", state="dead", dead_reason="crashed_worker")
    letter = show(queue, "a")
    assert letter is not None

    assert requeue(queue) == "queued"
    assert letters(queue) == []
    assert events_of(queue, "a") == []
    assert queue.run(calls.look(KEYS, "a")) == calls.Look("queued", None, 3, "")
    client: Any = queue.client
    assert client.ttl(KEYS.job("a")) == -1
    assert client.exists(KEYS.jobs("high", "t")) == 1
    lease = worker.lease_one()
    assert (lease.attempt, lease.crashes, lease.retries, lease.logged) == (4, 0, 0, 0)
    assert lease.payload == letter.raw
    assert lease.started_ms == lease.leased_ms
    assert end(queue, zombie, 1, "old ") == "lost"
    say(queue, lease, 1, "new ")
    end(queue, lease, 1, "new ")
    assert assert_ended_once(queue, "a").text == "new "
    assert told(queue) == [{"a": "dead"}]
    assert_drained(queue)


def test_requeue_again_changes_nothing_in_every_state_of_the_new_life(queue: Queue) -> None:
    dead_jobs(queue, "a")
    call = requeue_call(queue)
    assert queue.run(call).outcome == "queued"

    def again() -> str:
        before = snapshot(queue)
        outcome = queue.run(call).outcome
        assert snapshot(queue) == before
        return outcome

    assert again() == "queued"
    lease = Worker(queue).lease_one()
    assert again() == "queued"
    end(queue, lease, state="dead", dead_reason="crashed_worker")
    assert again() == "queued"
    assert requeue(queue) == "queued"
    assert Worker(queue, "w2").lease_one().attempt == 3


def test_the_history_of_earlier_lives_is_kept(queue: Queue) -> None:
    dead_jobs(queue, "a")
    first = letters(queue)[0]
    requeue(queue)
    die(queue, "a", reason="another_reason")
    second = show(queue, "a")
    assert second is not None
    assert [(life["letter"], life["reason"], life["attempt"]) for life in second.history] == [
        (first.letter, "crashed_worker", 1)
    ]
    requeue(queue)
    die(queue, "a")
    third = show(queue, "a")
    assert third is not None
    assert [life["reason"] for life in third.history] == ["crashed_worker", "another_reason"]


def test_a_job_whose_result_has_expired_can_be_requeued_by_its_letter(queue: Queue) -> None:
    dead_jobs(queue, "a")
    letter = letters(queue)[0].letter
    queue.client.delete(KEYS.job("a"), KEYS.log("a"), KEYS.result("a"))
    assert requeue(queue, letter) == "queued"
    assert Worker(queue).lease_one().attempt == 2
    assert queue.run(calls.status(KEYS)).dead == 0


def test_a_letter_whose_id_has_another_life_is_left(queue: Queue) -> None:
    dead_jobs(queue, "a")
    letter = letters(queue)[0].letter
    queue.client.delete(KEYS.job("a"), KEYS.log("a"), KEYS.result("a"))
    put(queue, "a")
    before = snapshot(queue)
    answer = queue.run(requeue_call(queue, letter))
    assert (answer.outcome, answer.state) == ("alive", "queued")
    assert snapshot(queue) == before


def test_a_purged_letter_cannot_be_requeued(queue: Queue) -> None:
    dead_jobs(queue, "a")
    call = requeue_call(queue)
    assert queue.run(dead_letters.dead_purge(KEYS, ["a"])) == 1
    before = snapshot(queue)
    assert queue.run(call).outcome == "unknown"
    assert snapshot(queue) == before
    assert_ended_once(queue, "a", "dead")


def test_a_full_queue_takes_no_requeued_job(queue: Queue) -> None:
    dead_jobs(queue, "a")
    queue.run(calls.limits(KEYS, max_entries=1))
    put(queue, "b")
    before = snapshot(queue)
    assert requeue(queue) == "full"
    assert snapshot(queue) == before


def test_a_requeued_job_has_its_times_anew(queue: Queue) -> None:
    dead_jobs(queue, "a", deadline_in_s=3600.0)
    requeue(queue)
    client: Any = queue.client
    assert client.zscore(KEYS.deadlines, "a") == float(client.hget(KEYS.job("a"), "deadline"))
    assert queue.run(calls.cancel(KEYS, "a")) == ("cancelled", None)
    assert_ended_once(queue, "a", "cancelled")
    assert_drained(queue)


# -- purging ---------------------------------------------------------------------------------------------------


def test_purging_deletes_letters_once_and_leaves_results(queue: Queue) -> None:
    dead_jobs(queue, "a", "b", "c")
    by_letter = letters(queue)[1].letter
    assert queue.run(dead_letters.dead_purge(KEYS, ["a", by_letter, "nobody"])) == 2
    assert queue.run(dead_letters.dead_purge(KEYS, ["a", by_letter, "nobody"])) == 0
    assert [letter.job_id for letter in letters(queue)] == ["c"]
    assert queue.run(dead_letters.dead_purge(KEYS, [])) == 0
    assert queue.run(dead_letters.dead_purge(KEYS, None)) == 1
    assert queue.run(dead_letters.dead_purge(KEYS, None)) == 0
    assert KEYS.dead not in key_names(queue)
    for job_id in "abc":
        assert_ended_once(queue, job_id, "dead")
    assert_drained(queue)


def test_a_large_foreign_entry_is_kept_in_part(queue: Queue) -> None:
    client: Any = queue.client
    client.xadd(KEYS.jobs("normal", "default"), {"x": "y" * 200_000})
    put(queue, "good")
    assert ids_of(Worker(queue).lease()) == ["good"]
    (letter,) = letters(queue)
    assert (letter.reason, letter.job_id, letter.size) == ("not_a_job", "", 65536)


def test_dead_letters_on_the_imitation_too(fake_redis: fakeredis.FakeRedis) -> None:
    queue = Queue(fake_redis, KEYS)
    dead_jobs(queue, "a", "b")
    assert json.loads((show(queue, "a") or letters(queue)[0]).raw or b"")["id"] == "a"
    assert requeue(queue) == "queued"
    assert queue.run(dead_letters.dead_purge(KEYS, None)) == 1
    assert end(queue, Worker(queue, "w9").lease_one()) == "ok"
    assert_drained(queue)
