"""Cancelling: in each state of a job, and who is told."""

from __future__ import annotations

from broker import calls
from broker.calls import Look
from broker.keys import Keys
from broker.queue import Queue
from tests.broker.steps import (
    LONG_MS,
    Worker,
    assert_drained,
    assert_ended_once,
    end,
    events_of,
    hear,
    ids_of,
    lapse,
    put,
    say,
    snapshot,
    tokens,
    told,
)

KEYS = Keys()


def cancel(queue: Queue, job_id: str = "a") -> tuple[str, str | None]:
    return queue.run(calls.cancel(KEYS, job_id))


def look(queue: Queue, job_id: str = "a") -> Look:
    return queue.run(calls.look(KEYS, job_id))


def assert_cancelled(queue: Queue, text: str = "") -> None:
    """Ended as cancelled, with what was logged of it, and never to be leased again."""
    result = assert_ended_once(queue, "a", "cancelled")
    assert result.text == text
    assert result.error is not None
    assert result.error.code == "cancelled"
    assert Worker(queue, "w9").lease(5) == []
    assert_drained(queue)


def test_a_waiting_job_never_runs(queue: Queue) -> None:
    put(queue, "first", "a", "last")
    worker = Worker(queue)
    running = worker.lease_one()
    assert cancel(queue) == ("cancelled", None)
    rest = worker.lease(5)
    assert ids_of(rest) == ["last"]
    for lease in [running, *rest]:
        end(queue, lease)
    assert look(queue).attempt == 0
    assert_cancelled(queue)


def test_a_waiting_jobs_run_is_told(queue: Queue) -> None:
    put(queue, "a", run="r")
    cancel(queue)
    assert told(queue) == [{"a": "cancelled"}]


def test_a_running_job_is_marked_and_ended_by_its_owner(queue: Queue) -> None:
    put(queue, "a")
    lease = Worker(queue).lease_one()
    assert say(queue, lease, 1, "x").outcome == "ok"
    assert cancel(queue) == ("cancelling", None)
    assert look(queue).state == "running"
    assert say(queue, lease, 2, "y") == calls.Published("cancel", 2)
    assert queue.run(calls.renew(KEYS, "w1", LONG_MS, [("a", 1)])) == ["cancel"]
    assert end(queue, lease, 2, "xy", state="cancelled") == "ok"
    result = assert_ended_once(queue, "a", "cancelled")
    assert result.text == "xy"
    assert_drained(queue)


def test_a_job_that_ends_before_it_sees_the_mark_has_succeeded(queue: Queue) -> None:
    put(queue, "a")
    lease = Worker(queue).lease_one()
    assert cancel(queue) == ("cancelling", None)
    assert end(queue, lease) == "ok"
    assert cancel(queue) == ("ended", "succeeded")
    assert_ended_once(queue, "a")


def test_after_the_end_nothing_changes(queue: Queue) -> None:
    put(queue, "a", "b")
    worker = Worker(queue)
    end(queue, worker.lease_one())
    running = worker.lease_one()
    before = snapshot(queue)
    assert cancel(queue) == ("ended", "succeeded")
    assert cancel(queue, "nobody") == ("unknown", None)
    assert snapshot(queue) == before
    assert say(queue, running, 1, "x").outcome == "ok"  # the neighbour is not hit


def test_a_marked_job_that_is_handed_back_ends(queue: Queue) -> None:
    put(queue, "a")
    lease = Worker(queue).lease_one()
    say(queue, lease, 1, "so ", "far")
    cancel(queue)
    assert queue.run(calls.release(KEYS, "w1", [calls.Handback("a", 1, False)])) == 1
    assert_cancelled(queue, "so far")


def test_a_marked_job_whose_worker_is_lost_ends_at_the_next_lease(queue: Queue) -> None:
    put(queue, "a", "b")
    lease = Worker(queue).lease_one()
    say(queue, lease, 1, "so ", "far")
    cancel(queue)
    lapse(queue, "a")
    (other,) = Worker(queue, "w2").lease(5)
    assert other.id == "b"
    end(queue, other)
    assert_cancelled(queue, "so far")


def test_a_job_whose_worker_is_lost_ends_at_once(queue: Queue) -> None:
    """No worker is up to see a mark."""
    put(queue, "a")
    lease = Worker(queue).lease_one()
    say(queue, lease, 1, "so ", "far")
    lapse(queue, "a")
    assert cancel(queue) == ("cancelled", None)
    assert say(queue, lease, 3, "!").outcome == "lost"
    assert_cancelled(queue, "so far")


def test_a_job_handed_back_ends_at_once(queue: Queue) -> None:
    put(queue, "a")
    Worker(queue).lease_one()
    queue.run(calls.release(KEYS, "w1", [calls.Handback("a", 1, False)]))
    assert cancel(queue) == ("cancelled", None)
    assert_cancelled(queue)


def test_what_was_logged_of_several_choices_is_kept_byte_for_byte(queue: Queue) -> None:
    put(queue, "a")
    lease = Worker(queue).lease_one()
    texts = ['"quoted" / \\ \n', "", "é\u2028\x7f", "\U0001f600", "plain"]
    events = tokens(lease, 1, *texts)
    events[1] = events[1].replace(b'"choice":0', b'"choice":1').replace(b'"token_ids":[2]', b'"token_ids":[]')
    events[4] = (
        events[4].replace(b'"choice":0', b'"choice":2')[:-1] + b',"finish_reason":"stop","stop_reason":7}'
    )
    queue.run(calls.publish(KEYS, "w1", "a", 1, 1, events))
    lapse(queue, "a")
    cancel(queue)
    result = look(queue).result
    assert result is not None
    assert [
        (choice.index, choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason)
        for choice in result.choices
    ] == [
        (0, texts[0] + texts[2] + texts[3], [1, 3, 4], "cancelled", None),
        (1, "", [], "cancelled", None),
        (2, "plain", [5], "stop", 7),
    ]
    assert events_of(queue, "a")[-1].type == "cancelled"


def test_owners_and_watchers_are_told_at_once(queue: Queue) -> None:
    put(queue, "waits", "runs")
    Worker(queue).lease_one()
    queue.run(calls.release(KEYS, "w1", [calls.Handback("waits", 1, False)]))
    with queue.client.pubsub() as channel:
        channel.subscribe(KEYS.control, KEYS.tokens("waits"))
        assert hear(channel, 1, timeout_s=0.05) == []
        Worker(queue, "w2").lease(2)
        queue.run(calls.release(KEYS, "w2", [calls.Handback("waits", 2, False)]))
        cancel(queue, "waits")
        cancel(queue, "runs")
        heard = hear(channel, 3)
    assert heard[0] == "wake"
    assert '"type":"cancelled"' in heard[1]
    assert heard[2] == "cancel:runs"
