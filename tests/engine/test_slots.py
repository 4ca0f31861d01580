"""Who gets the next slot."""

from __future__ import annotations

import pytest

from engine.blocks import IntegrityError
from engine.interface import Request
from engine.sequence import Line, Sequence
from engine.slots import SlotAllocator
from protocol import SamplingParams


def waiting(*needs: int, priorities: tuple[int, ...] = ()) -> Line:
    """A line of sequences, named by what each needs in blocks (of one token)."""
    line = Line()
    for arrival, need in enumerate(needs, start=1):
        priority = priorities[arrival - 1] if priorities else 1
        line.add(
            Sequence(Request(str(need), ((3,) * need,), SamplingParams(), 0, (1,), priority), 0, arrival)
        )
    return line


def admitted(policy: str, line: Line, free_blocks: int, slots: int = 8) -> list[str]:
    """Ids in the order of admission, until nobody more can enter."""
    allocator = SlotAllocator(slots, policy)
    order = []
    while sequence := allocator.admit(line, lambda s: s.num_tokens, free_blocks):
        free_blocks -= sequence.num_tokens
        order.append(sequence.id)
    return order


@pytest.mark.parametrize(
    ("policy", "order"), [("first-fit", ["4", "6"]), ("best-fit", ["11"]), ("priority", [])]
)
def test_policies_differ_where_the_first_does_not_fit(policy: str, order: list[str]) -> None:
    assert admitted(policy, waiting(20, 4, 11, 6), free_blocks=12) == order


@pytest.mark.parametrize("policy", ["first-fit", "priority"])
def test_where_all_fit_the_order_is_priority_then_arrival(policy: str) -> None:
    line = waiting(1, 2, 3, 4, priorities=(2, 1, 0, 1))
    assert admitted(policy, line, free_blocks=100) == ["3", "2", "4", "1"]


def test_best_fit_takes_the_earlier_of_two_alike() -> None:
    line = waiting(5, 7, 6)
    line.add(Sequence(Request("late", ((3,) * 7,), SamplingParams(), 0, (1,)), 0, 9))
    assert admitted("best-fit", line, free_blocks=7) == ["7"]


def test_no_more_than_there_are_slots() -> None:
    line = waiting(*range(1, 10))
    assert len(admitted("first-fit", line, free_blocks=1000, slots=3)) == 3
    assert len(line) == 6


def arrivals_admitted_before(
    policy: str, large: Sequence, small_priority: int, free_blocks: int, slots: int = 4
) -> int:
    """How many later arrivals of one block enter before `large`, which needs 10. Each leaves as the next arrives."""
    allocator, line = SlotAllocator(slots, policy), Line()
    line.add(large)
    for count in range(1000):
        line.add(
            Sequence(Request(f"s{count}", ((3,),), SamplingParams(), 0, (1,), small_priority), 0, 100 + count)
        )
        for free in (free_blocks, 12):  # all the room there is, once nobody else runs
            chosen = allocator.admit(line, lambda s: s.num_tokens, free)
            if chosen is large:
                return count
            if chosen is not None:
                allocator.release(chosen)
                break
    raise AssertionError("starved")


@pytest.mark.parametrize("policy", ["first-fit", "best-fit"])
def test_the_large_is_passed_by_no_more_than_patience(policy: str) -> None:
    large = Sequence(Request("large", ((3,) * 10,), SamplingParams(), 0, (1,)), 0, 1)
    assert arrivals_admitted_before(policy, large, small_priority=1, free_blocks=5) == 4


@pytest.mark.parametrize("policy", ["first-fit", "best-fit"])
def test_a_low_priority_is_not_starved_by_a_stream_of_high_ones(policy: str) -> None:
    low = Sequence(Request("low", ((3,),), SamplingParams(), 0, (1,), 2), 0, 1)
    assert arrivals_admitted_before(policy, low, small_priority=0, free_blocks=12) <= 4


def test_while_one_is_due_nobody_passes_it() -> None:
    line = waiting(10, 1, 1, 1)
    next(iter(line)).passed_over = 4
    allocator = SlotAllocator(4, "first-fit")
    assert allocator.admit(line, lambda s: s.num_tokens, 9) is None
    due = allocator.admit(line, lambda s: s.num_tokens, 10)
    assert due is not None
    assert due.id == "10"


def test_an_earlier_arrival_that_comes_back_does_not_count_as_passing() -> None:
    line = waiting(1, 10)
    allocator = SlotAllocator(4, "first-fit")
    for _ in range(20):  # preempted again and again
        again = allocator.admit(line, lambda s: s.num_tokens, 5)
        assert again is not None
        allocator.release(again)
        line.add(again)
    assert [sequence.passed_over for sequence in line] == [0, 0]


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="first-fit, best-fit, priority"):
        SlotAllocator(4, "worst-fit")


def test_a_slot_given_back_twice_is_noticed() -> None:
    allocator, line = SlotAllocator(2), waiting(1)
    sequence = allocator.admit(line, lambda s: s.num_tokens, 5)
    assert sequence is not None
    allocator.release(sequence)
    with pytest.raises(IntegrityError):
        allocator.release(sequence)


def test_slots_held_twice_are_noticed() -> None:
    allocator, line, running = SlotAllocator(2), waiting(1, 2), Line()
    for _ in range(2):
        sequence = allocator.admit(line, lambda s: s.num_tokens, 5)
        assert sequence is not None
        running.add(sequence)
    allocator.check_integrity(running)
    running.last.slot = 1 - (running.last.slot or 0)
    with pytest.raises(IntegrityError):
        allocator.check_integrity(running)
