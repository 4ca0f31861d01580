"""Anything may happen to the scheduler in any order, with no model: what must hold holds after each thing.

A sequence gets a token whenever it has caught up. The pool is small, so that sequences are preempted and blocks
evicted all the time; prompts begin alike, so that they share.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.blocks import BlockPool
from engine.interface import Request, Written
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sequence, place
from engine.slots import POLICIES, SlotAllocator
from protocol import ErrorCode, RequestError, SamplingParams

Name = tuple[str, int]
"""Request id and choice."""
TOPICS = [[topic * 100 + place for place in range(40)] for topic in (1, 2)]


def name(sequence: Sequence) -> Name:
    return sequence.id, sequence.choice


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, ends, aborts; the books are kept a second time, plainly, and compared."""

    @initialize(
        num_blocks=st.integers(6, 14),
        block_size=st.sampled_from([1, 2, 4]),
        slots=st.integers(2, 5),
        extra_budget=st.integers(0, 6),
        policy=st.sampled_from(sorted(POLICIES)),
        looks_ahead=st.sampled_from([False, False, True]),
    )
    def start(
        self, num_blocks: int, block_size: int, slots: int, extra_budget: int, policy: str, looks_ahead: bool
    ) -> None:
        self.patience, self.budget, self.policy = slots, slots + extra_budget, policy
        self.scheduler = Scheduler(
            BlockPool(num_blocks, block_size), SlotAllocator(slots, policy), self.budget
        )
        if not looks_ahead:
            self.scheduler.forecast.fits = lambda *_: True  # type: ignore[method-assign]
        self.alive: dict[Name, Sequence] = {}
        self.written: dict[Name, list[int]] = {}
        """What each has been told to hold so far, prompt and output."""
        self.kv: dict[int, list[tuple[int, ...]]] = {}
        """Of each block: the tokens up to and with each of those written to it."""
        self.passed: Counter[Name] = Counter()
        self.requests = 0

    @rule(
        length=st.integers(1, 20),
        topic=st.sampled_from([*range(len(TOPICS)), None]),
        max_tokens=st.integers(4, 20),
        priority=st.integers(0, 2),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        logged=st.integers(0, 3),
        logits=st.booleans(),
    )
    def add(
        self,
        length: int,
        topic: int | None,
        max_tokens: int,
        priority: int,
        n: int,
        logged: int,
        logits: bool,
    ) -> None:
        self.requests += 1
        alike = (
            TOPICS[topic] if topic is not None else [10_000 * self.requests + place for place in range(40)]
        )
        written = tuple(Written((7,) * min(logged, max_tokens - 1)) for _ in range(n))
        new = Request(
            f"r{self.requests}",
            (tuple(alike[:length]),),
            SamplingParams(n=n),
            0,
            (max_tokens,),
            priority,
            written=written,
        )
        if length + len(written[0].token_ids) > self.scheduler.blocks.capacity:
            with pytest.raises(RequestError) as refused:
                self.scheduler.add(new)
            assert refused.value.code == ErrorCode.KV_CAPACITY_EXCEEDED
            return
        for sequence in self.scheduler.add(new):
            sequence.wants_prompt_logits = logits and sequence.choice == 0
            self.alive[name(sequence)] = sequence
            self.written[name(sequence)] = list(sequence.token_ids)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        ids = sorted({request_id for request_id, _ in self.alive})
        self.forget(ids[which % len(ids)])

    @rule(count=st.integers(1, 12), stops=st.booleans())
    def step(self, count: int, stops: bool) -> None:
        for number in range(count):
            self.one_step(stops=stops and number == 0)

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        """Idle blocks lose what they held."""
        pool = self.scheduler.blocks
        pool.free(pool.allocate(min(count, pool.num_free)))

    @rule()
    def drain(self) -> None:
        """Everything ends: nobody starves and nothing stalls."""
        tokens = sum(sequence.request.max_tokens[0] + sequence.num_tokens for sequence in self.alive.values())
        for _ in range(10 * tokens + 10):
            if not self.scheduler.has_work():
                break
            self.one_step()
        assert not self.alive
        assert not self.scheduler.has_work()
        blocks = self.scheduler.blocks
        assert (blocks.num_used, blocks.num_free) == (0, blocks.num_blocks)
        assert self.scheduler.slots.num_free == self.scheduler.slots.num_slots

    @invariant()
    def the_books_balance(self) -> None:
        self.scheduler.check_integrity()
        waiting, running = list(self.scheduler.waiting), list(self.scheduler.running)
        following = [follower for leader in [*waiting, *running] for follower in leader.followers]
        assert Counter(map(name, [*waiting, *running, *following])) == Counter(self.alive.keys())
        for sequence in [*waiting, *following]:
            assert sequence.slot is None
            assert (sequence.block_table, sequence.num_computed_tokens) == ([], 0)
        for sequence in self.alive.values():
            assert sequence.token_ids == self.written[name(sequence)], "a token is lost"

    def one_step(self, stops: bool = False) -> None:
        """One step; with `stops` the first that gets a token ends with it."""
        scheduler = self.scheduler
        before = {name(sequence) for sequence in scheduler.running}
        in_line = list(scheduler.waiting)
        preempted = scheduler.num_preemptions
        decoding = {name(one) for one in scheduler.running if one.num_uncomputed_tokens == 1}
        prefilling = [one for one in scheduler.running if one.num_uncomputed_tokens > 1]
        had_work = scheduler.has_work()
        plan = scheduler.schedule()
        planned = {name(sequence) for sequence, _ in plan.chunks}
        outgrown = {name(sequence) for sequence in plan.outgrown}
        assert bool(plan.chunks or plan.outgrown) == had_work, "a stall, or work out of nothing"
        assert len(planned) == len(plan.chunks), "planned twice"
        assert sum(count for _, count in plan.chunks) <= self.budget
        if scheduler.num_preemptions == preempted:
            assert decoding <= planned | outgrown, "a decode was left out"
            assert not prefilling or name(prefilling[0]) in planned, (
                "the first prompt that has begun stood still"
            )
        self.check_admissions(
            in_line, [sequence for sequence, _ in plan.chunks if name(sequence) not in before]
        )
        for sequence in plan.outgrown:
            assert sequence.num_tokens == scheduler.blocks.capacity + 1
            assert not sequence.block_table
            self.drop(sequence)
        self.compute(plan)
        for sequence in [sequence for sequence, _ in plan.chunks if sequence.num_uncomputed_tokens == 0]:
            self.draw(sequence, stops)
            stops = False

    def check_admissions(self, in_line: list[Sequence], admitted: list[Sequence]) -> None:
        """Later arrivals pass a waiting one only so often, and under `priority` nobody is passed at all."""
        for newcomer in admitted:
            assert not newcomer.wants_prompt_logits or newcomer.num_computed_tokens == 0
            left = [one for one in in_line if one.slot is None]
            if self.policy == "priority":
                assert all(place(newcomer) < place(one) for one in left), "passed in line"
            self.passed.update(name(one) for one in left if one.arrival < newcomer.arrival)
        for sequence in in_line:
            # Under `priority` a stream of more urgent ones does pass: that is what it is for.
            assert self.policy == "priority" or self.passed[name(sequence)] <= self.patience, "starved"

    def compute(self, plan: Plan) -> None:
        """Write each token's history where its KV would be, and read back the whole history of each sequence."""
        size = self.scheduler.blocks.block_size
        for source, target in plan.copies:
            self.kv[target] = list(self.kv[source])
        for sequence, count in plan.chunks:
            start = sequence.num_computed_tokens
            assert 1 <= count <= sequence.num_uncomputed_tokens
            assert start + count <= len(sequence.block_table) * size, "a block is missing"
            for position in range(start, start + count):
                block, offset = sequence.block_table[position // size], position % size
                assert self.scheduler.blocks.num_owners(block) == 1, "written to a shared block"
                self.kv[block] = [*self.kv.get(block, [])[:offset], tuple(sequence.token_ids[: position + 1])]
        for sequence, count in plan.chunks:
            for position in range(sequence.num_computed_tokens + count):
                there = self.kv[sequence.block_table[position // size]][position % size]
                assert there == tuple(sequence.token_ids[: position + 1]), "the KV of other tokens"
        for sequence, count in plan.chunks:
            self.scheduler.computed(sequence, count)

    def draw(self, sequence: Sequence, stops: bool) -> None:
        sequence.token_ids.append(7 + sequence.choice)
        self.written[name(sequence)].append(7 + sequence.choice)
        if stops or sequence.num_output_tokens >= sequence.request.max_tokens[0]:
            self.scheduler.finish(sequence)
            self.drop(sequence)

    def forget(self, request_id: str) -> None:
        for one in [one for one in self.alive if one[0] == request_id]:
            self.scheduler.remove(self.alive[one])
            self.drop(self.alive[one])

    def drop(self, sequence: Sequence) -> None:
        del self.alive[name(sequence)], self.written[name(sequence)]
        del self.passed[name(sequence)]

    def teardown(self) -> None:
        if hasattr(self, "alive"):
            self.drain()
            self.the_books_balance()


def check(**profile: Any) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        SchedulerMachine,
        settings=settings(
            deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), **profile
        ),
    )


def test_whatever_happens_nothing_is_lost_shared_wrongly_or_starved() -> None:
    check(max_examples=140, stateful_step_count=25)


@pytest.mark.long
def test_whatever_happens_nothing_is_lost_shared_wrongly_or_starved_at_length() -> None:
    check(max_examples=500, stateful_step_count=50)
