"""What a watcher makes of another life of its job, of data that were lost, and of what somebody spoilt."""

from __future__ import annotations

from typing import Any

import pytest

import broker.watch
from broker import calls
from broker.dead_letters import dead_list, dead_requeue
from broker.queue import Queue
from protocol import MillstreamError
from tests.broker.steps import Worker, end, job, say
from tests.broker.watchers import KEYS, TEXT, WORDS, Watch, cut_subscriptions, started


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that looks again after 0.1 s without a message, not after the whole time it is given."""
    monkeypatch.setattr(broker.watch, "SILENCE_S", 0.1)


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(
    "next_life", [[], ["B1 "], ["B1 ", "B2 ", "B3 ", "B4 "], ["A1 ", "A2 ", "A3 ", "A4 "]]
)
@pytest.mark.parametrize("has_ended", [False, True])
def test_who_watches_a_life_that_dies_hears_of_no_other(
    queue: Queue, watch: Watch, next_life: list[str], is_cut: bool, has_ended: bool
) -> None:
    """A requeued job has a new log. Who was cut off meanwhile is told the same as who was not."""
    lease = started(queue)
    say(queue, lease, 1, "A1 ", "A2 ", "A3 ")
    watcher = watch("a")
    watcher.take(3)
    if is_cut:
        cut_subscriptions(queue)
    end(queue, lease, 3, "A1 A2 A3 ", state="dead", dead_reason="crashed_worker")
    (letter,) = queue.run(dead_list(KEYS, 1))
    assert queue.run(dead_requeue(KEYS, letter.letter, job("a"))).outcome == "queued"
    second = Worker(queue, "w2").lease_one()
    if next_life:
        say(queue, second, 1, *next_life)
    if has_ended:
        end(queue, second, len(next_life), "".join(next_life))
    watcher.rest()
    watcher.assert_whole("A1 A2 A3 ", "dead")
    assert {event.attempt for event in watcher.events} == {1}
    if has_ended:
        late = watch("a")
        late.rest()
        late.assert_whole("".join(next_life))
    else:
        queue.run(calls.cancel(KEYS, "a"))
        end(queue, second, len(next_life), state="cancelled")


def test_who_has_seen_nothing_of_a_life_that_died_hears_the_next(queue: Queue, watch: Watch) -> None:
    lease = started(queue)
    say(queue, lease, 1, "A1 ")
    end(queue, lease, 1, "A1 ", state="dead", dead_reason="crashed_worker")
    (letter,) = queue.run(dead_list(KEYS, 1))
    queue.run(dead_requeue(KEYS, letter.letter, job("a")))
    second = Worker(queue, "w2").lease_one()
    say(queue, second, 1, "B1 ", "B2 ")
    end(queue, second, 2, "B1 B2 ")
    watcher = watch("a")
    watcher.rest()
    watcher.assert_whole("B1 B2 ")


@pytest.mark.usefixtures("short_silence", "keys_broken_by_hand")
@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("said", ["the same", "something else"])
def test_a_server_that_lost_its_last_data(queue: Queue, watch: Watch, said: str, has_ended: bool) -> None:
    """The next attempt goes on from what is left. What a watcher has seen beyond it is the same, or it is told."""
    lease = started(queue)
    say(queue, lease, 1, *WORDS[:5])
    watcher = watch("a")
    watcher.take(5)
    client: Any = queue.client
    client.ltrim(KEYS.log("a"), 0, 2)
    queue.run(calls.release(KEYS, "w1", [calls.Handback("a", 1, False)]))
    second = Worker(queue, "w2").lease_one()
    words = [*WORDS[:4], WORDS[4] if said == "the same" else "else ", *WORDS[5:]]
    say(queue, second, 4, *words[3:])
    if has_ended:
        end(queue, second, 20, "".join(words))
    if said == "the same":
        end(queue, second, 20, TEXT)
        watcher.rest()
        watcher.assert_whole()
    else:
        with pytest.raises(MillstreamError, match="job a: its log is spoilt: event 5 is not what it was"):
            watcher.rest()
        assert watcher.text == "".join(WORDS[:5])


GARBAGE = [
    b"garbage",
    b"\xff\xfe",
    b"",
    b"[]",
    b'{"type":"mood","id":"a","seq":3,"attempt":1}',
    b'{"type":"token","id":"a","seq":3,"attempt":1,"choice":"x","text":5,"token_ids":3}',
    b'{"type":"token","id":"a","seq":7,"attempt":1,"choice":0,"text":"x","token_ids":[1]}',
]


@pytest.mark.usefixtures("short_silence", "keys_broken_by_hand")
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("seen", [0, pytest.param(2, marks=pytest.mark.long), 3])
def test_garbage_in_a_log_is_made_good_from_the_result(
    queue: Queue, watch: Watch, garbage: bytes, seen: int
) -> None:
    """Also where the last event that was seen has become garbage."""
    lease = started(queue)
    watcher = watch("a")
    if seen:
        say(queue, lease, 1, *WORDS[:seen])
        watcher.take(seen)
        cut_subscriptions(queue)
    say(queue, lease, seen + 1, *WORDS[seen:])
    end(queue, lease, 20, TEXT)
    client: Any = queue.client
    client.lset(KEYS.log("a"), 2, garbage)
    if seen == 3 and b'"seq":7' in garbage:
        with pytest.raises(MillstreamError, match="event 3 is not what it was"):
            watcher.rest()
        return
    watcher.rest()
    watcher.assert_whole()


@pytest.mark.usefixtures("short_silence", "keys_broken_by_hand")
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_the_log_of_a_job_that_runs_is_told_in_one_line(
    queue: Queue, watch: Watch, garbage: bytes
) -> None:
    lease = started(queue)
    say(queue, lease, 1, *WORDS[:2])
    client: Any = queue.client
    client.rpush(KEYS.log("a"), garbage)
    watcher = watch("a")
    with pytest.raises(MillstreamError, match="job a: its log is spoilt: event 3 ") as raised:
        watcher.rest()
    assert len(str(raised.value).splitlines()) == 1
    assert watcher.text == "".join(WORDS[:2])


@pytest.mark.usefixtures("short_silence")
def test_garbage_on_the_channel_is_passed_over(queue: Queue, watch: Watch) -> None:
    lease = started(queue)
    watcher = watch("a")
    say(queue, lease, 1, *WORDS[:5])
    watcher.take(5)
    for garbage in GARBAGE:
        queue.client.publish(KEYS.tokens("a"), garbage)
    say(queue, lease, 6, *WORDS[5:])
    end(queue, lease, 20, TEXT)
    watcher.rest()
    watcher.assert_whole()
