"""Who of the waiting comes first: those whose prefix is there, the longest near the end, and nobody for long."""

from __future__ import annotations

import pytest

from engine.order import WORTH_WAITING
from engine.slots import POLICIES
from tests.engine.test_scheduler import Loop, request

SIZE = 4
LONG = WORTH_WAITING * SIZE + 1
"""Tokens of a prefix that is waited for, and one of its own."""


def roomy(**options: int | str) -> Loop:
    return Loop(**{"num_blocks": 200, "block_size": SIZE, "slots": 8, "budget": 200, **options})  # type: ignore[arg-type]


def test_those_whose_prefix_is_there_come_together() -> None:
    loop = roomy()
    loop.add(request("first", LONG, 1, topic="t"))
    loop.run()
    loop.add(
        request("other", LONG, 1),
        request("equal", LONG, 1, topic="t"),
        request("more", 2 * LONG, 1, topic="t"),
    )
    loop.run()
    assert loop.admitted == ["first", "equal", "more", "other"]


def test_the_longer_part_that_is_there_comes_first() -> None:
    loop = roomy(slots=1)
    loop.add(request("long", 2 * LONG, 1, topic="l"), request("short", LONG, 1, topic="s"))
    loop.run()
    loop.add(request("short again", LONG, 1, topic="s"), request("long again", 2 * LONG, 1, topic="l"))
    loop.run()
    assert loop.admitted[2:] == ["long again", "short again"]


def test_a_long_prefix_is_computed_once_however_many_come_with_it() -> None:
    loop = roomy()
    loop.add(*(request(f"r{index}", LONG, 3, topic="t") for index in range(5)), request("other", 10, 3))
    loop.run()
    # The others of the topic wait a step, one of another topic does not, and nobody's decode stops.
    assert loop.plans[0] == {"r0": LONG, "other": 10}
    assert loop.plans[1] == {"r0": 1, "other": 1, "r1": 1, "r2": 1, "r3": 1, "r4": 1}


def test_a_short_prefix_is_not_waited_for() -> None:
    loop = roomy()
    loop.add(*(request(f"r{index}", LONG - SIZE, 3, topic="t") for index in range(2)))
    loop.step()
    assert loop.plans[0] == {"r0": LONG - SIZE, "r1": LONG - SIZE}


def test_it_is_waited_for_over_several_steps_and_only_so_long() -> None:
    loop = roomy(budget=2 * SIZE)
    loop.add(request("first", LONG, 3, topic="t"), request("second", LONG, 3, topic="t"))
    for _ in range(20):
        loop.step()
    prefilled = [plan.get("second", 0) for plan in loop.plans]
    assert max(prefilled) == 1  # nothing of the prefix was computed again
    assert loop.ended == {"first": 3, "second": 3}


@pytest.mark.parametrize("end", ["aborted", "preempted"])
def test_if_it_does_not_come_after_all_nobody_waits_on(end: str) -> None:
    loop = roomy(budget=2 * SIZE)
    loop.add(request("first", LONG, 3, topic="t"), request("second", LONG, 3, topic="t"))
    loop.step()
    if end == "aborted":
        loop.abort("first")
    else:
        loop.scheduler._preempt(loop.sequences["first"])
    loop.step()
    assert loop.plans[1]  # the one that goes on computes it
    loop.run()
    assert loop.ended["second"] == 3


def test_a_lower_priority_does_not_enter_while_a_higher_one_waits_for_its_prefix() -> None:
    loop = roomy()
    for name, topic, priority in [("a", "t", 1), ("b", "t", 1), ("high", "h", 0), ("low", "l", 2)]:
        loop.add(request(name, LONG, 3, priority=priority, topic=topic))
    loop.step()
    assert loop.admitted == ["high", "a"]
    loop.step()
    assert loop.admitted == ["high", "a", "b", "low"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_prefix_that_is_there_does_not_outdo_a_priority(policy: str) -> None:
    loop = roomy(slots=1, policy=policy)
    loop.add(request("first", LONG, 1, topic="t", priority=2))
    loop.run()
    loop.add(request("again", LONG, 1, topic="t", priority=2), request("other", LONG, 1, priority=1))
    loop.run()
    assert loop.admitted == ["first", "other", "again"]


def test_under_the_policy_priority_the_line_is_kept() -> None:
    loop = roomy(slots=1, policy="priority")
    loop.add(request("first", LONG, 1, topic="t"))
    loop.run()
    loop.add(request("other", LONG, 1), request("again", LONG, 1, topic="t"))
    loop.run()
    assert loop.admitted == ["first", "other", "again"]


def test_one_whose_prefix_never_comes_is_passed_by_no_more_than_patience() -> None:
    loop = roomy(slots=2)
    loop.add(request("first", LONG, 1, topic="t"))
    loop.run()
    loop.add(request("other", LONG, 1))
    for number in range(50):
        loop.add(request(f"more{number}", LONG, 1, topic="t"))
    loop.run()
    assert loop.admitted.index("other") <= 1 + 2


def test_near_the_end_the_longest_start_first() -> None:
    loop = roomy(slots=2)
    loop.scheduler.forecast.lengths.observe(8)
    # While the line is long they come as they arrived; the last two are turned round.
    loop.add(*(request(f"r{length}", 3, length) for length in (2, 3, 4, 5, 6, 9)))
    loop.run()
    assert loop.admitted == ["r2", "r3", "r4", "r5", "r9", "r6"]


def test_what_may_be_longer_than_any_output_of_late_is_taken_for_as_long() -> None:
    loop = roomy(slots=2)
    for length in (2, 3, 4, 5):
        loop.add(request(f"r{length}", 3, length))
    loop.add(request("some", 3, 40), request("more", 3, 50))
    loop.run()
    assert loop.admitted[-2:] == ["some", "more"]  # nothing is known to tell them apart


def test_while_others_arrive_the_longest_is_not_preferred() -> None:
    loop = roomy(slots=1)
    loop.add(request("r3", 3, 3))
    for length in (4, 5, 6, 7):
        loop.step()
        loop.add(request(f"r{length}", 3, length))
    loop.run()
    assert loop.admitted[:2] == ["r3", "r4"]
