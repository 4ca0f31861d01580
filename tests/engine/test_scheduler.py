"""The scheduling loop, with no model and no torch: sequences get a token whenever they have caught up."""

from __future__ import annotations

import subprocess
import sys
import zlib
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockPool
from engine.interface import Request
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sequence
from engine.slots import POLICIES, SlotAllocator
from protocol import ErrorCode, RequestError, SamplingParams


def request(
    name: str, prompt: int, max_tokens: int = 4, priority: int = 1, n: int = 1, topic: str | None = None
) -> Request:
    """Prompts of one topic begin alike; a name without one has a topic of its own."""
    first = 1000 * zlib.crc32((topic or name).encode())
    tokens = tuple(range(first, first + prompt))
    return Request(name, (tokens,), SamplingParams(n=n), 0, (max_tokens,), priority)


def label(sequence: Sequence) -> str:
    return sequence.id if sequence.request.params.n == 1 else f"{sequence.id}.{sequence.choice}"


@dataclass
class Loop:
    """The scheduler with a model that answers 7, and every invariant looked at after each step."""

    num_blocks: int = 16
    block_size: int = 4
    slots: int = 4
    budget: int = 8
    policy: str = "first-fit"
    ended: dict[str, int] = field(default_factory=dict)
    """Output tokens of each sequence that has ended."""
    admitted: list[str] = field(default_factory=list)
    plans: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        pool = BlockPool(self.num_blocks, self.block_size)
        self.scheduler = Scheduler(pool, SlotAllocator(self.slots, self.policy), self.budget)
        self.sequences: dict[str, Sequence] = {}

    def admit_what_fits_now(self) -> None:
        """Leave what is to come out of account, so that the pool overflows."""
        self.scheduler.forecast.fits = lambda *_: True  # type: ignore[method-assign]

    def add(self, *requests: Request) -> None:
        for new in requests:
            self.sequences |= {label(sequence): sequence for sequence in self.scheduler.add(new)}

    def abort(self, request_id: str) -> None:
        for name in [name for name, sequence in self.sequences.items() if sequence.id == request_id]:
            self.scheduler.remove(self.sequences.pop(name))

    def step(self) -> Plan:
        decoding = {label(s) for s in self.scheduler.running if s.num_uncomputed_tokens == 1}
        preemptions = self.scheduler.num_preemptions
        running = {label(s) for s in self.scheduler.running}
        plan = self.scheduler.schedule()
        self.admitted += [label(s) for s, _ in plan.chunks if label(s) not in running]
        self.check(plan, decoding if self.scheduler.num_preemptions == preemptions else set())
        for sequence in plan.outgrown:
            self._end(sequence)
        for sequence, count in plan.chunks:
            self._compute(sequence, count)
        self.scheduler.check_integrity()
        return plan

    def run(self, limit: int = 2000) -> None:
        while self.scheduler.has_work():
            assert len(self.plans) < limit, "no progress"
            self.step()

    def check(self, plan: Plan, decoding: set[str]) -> None:
        planned = {label(sequence): count for sequence, count in plan.chunks}
        assert planned or plan.outgrown or not self.scheduler.has_work(), "an empty step with work to do"
        assert len(planned) == len(plan.chunks), "planned twice"
        assert sum(planned.values()) <= self.budget
        assert decoding <= planned.keys() | {label(s) for s in plan.outgrown}, "a decode was starved"
        for sequence, count in plan.chunks:
            assert 1 <= count <= sequence.num_uncomputed_tokens
            room = len(sequence.block_table) * self.block_size
            assert sequence.num_computed_tokens + count <= room, "a block is missing"
            written = sequence.block_table[sequence.num_computed_tokens // self.block_size :]
            assert all(self.scheduler.blocks.num_owners(block) == 1 for block in written), (
                "writes to a shared block"
            )
        self.scheduler.check_integrity()
        self.plans.append(planned)

    def _compute(self, sequence: Sequence, count: int) -> None:
        self.scheduler.computed(sequence, count)
        if sequence.num_uncomputed_tokens == 0:
            sequence.token_ids.append(7 + sequence.choice)
            if sequence.num_output_tokens == sequence.request.max_tokens[0]:
                self.scheduler.finish(sequence)
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        assert label(sequence) not in self.ended, "ended twice"
        assert not sequence.block_table
        assert sequence.slot is None
        self.ended[label(sequence)] = sequence.num_output_tokens
        del self.sequences[label(sequence)]


def test_prompts_and_decodes_share_a_step() -> None:
    loop = Loop()
    loop.add(request("a", 3), request("b", 10))
    for _ in range(2):
        loop.step()
    loop.add(request("c", 8))
    loop.run()
    assert loop.plans == [
        {"a": 3, "b": 5},
        {"a": 1, "b": 5},
        {"a": 1, "b": 1, "c": 6},
        {"a": 1, "b": 1, "c": 2},
        {"b": 1, "c": 1},
        {"c": 1},
        {"c": 1},
    ]


@pytest.mark.parametrize("budget", [4, 5, 7, 8, 16, 17, 33, 64])
def test_a_prompt_larger_than_the_budget_spans_steps_and_decodes_go_on(budget: int) -> None:
    loop = Loop(num_blocks=64, budget=budget)
    loop.add(request("short", 3, 40), request("long", 50, 5))
    loop.run()  # step() itself checks that no decode is left out
    assert loop.ended == {"short": 40, "long": 5}


def test_slots_and_blocks_are_free_in_the_step_that_ends_a_sequence() -> None:
    loop = Loop(slots=1)
    loop.add(request("a", 3, 1), request("b", 3, 1))
    loop.step()
    assert loop.ended == {"a": 1}
    assert loop.scheduler.blocks.num_used == 0
    loop.step()
    assert loop.ended == {"a": 1, "b": 1}


def test_the_latest_of_the_lowest_priority_makes_room_and_loses_nothing() -> None:
    loop = Loop(num_blocks=6, block_size=4, budget=16)
    loop.admit_what_fits_now()
    loop.add(request("high", 4, 14, priority=0), request("low", 4, 14, priority=2), request("mid", 4, 14))
    victims = []
    while loop.scheduler.has_work():
        before = {s.id for s in loop.scheduler.running}
        preemptions = loop.scheduler.num_preemptions
        loop.step()
        if loop.scheduler.num_preemptions > preemptions:
            victims += sorted(before - {s.id for s in loop.scheduler.running} - loop.ended.keys())
    assert victims[0] == "low"
    assert "high" not in victims
    assert loop.ended == {"high": 14, "mid": 14, "low": 14}


def test_who_holds_least_alone_makes_room() -> None:
    """Not who has computed least: of the two that share a prompt only a block each would be lost."""
    loop = Loop(num_blocks=12, block_size=4, slots=3, budget=64)
    loop.admit_what_fits_now()
    loop.add(request("pair", 17, 12, n=2), request("alone", 13, 20))
    while not loop.scheduler.num_preemptions:
        running = {label(s): s.num_computed_tokens for s in loop.scheduler.running}
        loop.step()
    (victim,) = running.keys() - {label(s) for s in loop.scheduler.running} - loop.ended.keys()
    assert victim == "pair.1"
    assert running[victim] > running["alone"]
    loop.run()
    assert loop.ended == {"pair.0": 12, "pair.1": 12, "alone": 20}
    assert loop.scheduler.num_recomputed_tokens <= 12


def test_a_preempted_sequence_goes_before_later_arrivals() -> None:
    loop = Loop(num_blocks=4, block_size=4, budget=16)
    loop.admit_what_fits_now()
    loop.add(request("a", 4, 9), request("b", 4, 9), request("late", 4, 2))
    loop.run()
    assert loop.scheduler.num_preemptions > 0
    again = [name for name in loop.admitted if loop.admitted.count(name) > 1]
    assert again
    assert loop.admitted.index("late") > max(i for i, name in enumerate(loop.admitted) if name in again)


def test_alone_it_may_fill_the_pool_and_then_ends() -> None:
    loop = Loop(num_blocks=4, block_size=4)
    loop.add(request("a", 5, 100), request("b", 3, 2))
    loop.run()
    assert loop.ended == {"a": 16 - 5 + 1, "b": 2}  # the last token drawn needs no KV


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    loop = Loop(num_blocks=8, block_size=8)
    with pytest.raises(RequestError, match=r"80 tokens.* 64") as refused:
        loop.add(request("big", 80))
    assert refused.value.code == ErrorCode.KV_CAPACITY_EXCEEDED
    loop.add(request("just", 64, 1))
    loop.run()
    assert loop.ended == {"just": 1}


@pytest.mark.parametrize("policy", ["first-fit", "best-fit", "priority"])
def test_a_long_prompt_behind_an_endless_stream_of_short_ones(policy: str) -> None:
    loop = Loop(num_blocks=14, block_size=8, slots=4, budget=64, policy=policy)
    loop.add(*(request(f"early{i}", 9, 24 - 5 * i) for i in range(3)))
    loop.step()
    loop.add(request("long", 88, 8))
    for count in range(200):
        loop.add(request(f"short{count}", 9, 24 - count % 7))  # they must not all end at once
        while len(loop.scheduler.waiting) >= 6:
            loop.step()
    loop.run()
    first = {name: loop.admitted.index(name) for name in loop.ended}
    passed = [name for name in first if name.startswith("short") and first[name] < first["long"]]
    assert len(passed) <= (0 if policy == "priority" else 2 * 4)
    assert loop.ended["long"] == 8
    assert len(loop.ended) == 204


def test_more_slots_than_budget_would_starve_a_decode() -> None:
    with pytest.raises(ValueError, match="4 slots need a budget"):
        Loop(slots=4, budget=3)


def test_choices_of_a_prompt_share_it_and_copy_what_they_write_to() -> None:
    loop = Loop(num_blocks=32, block_size=4, slots=3, budget=16)
    loop.add(request("r", 10, 3, n=4))
    assert loop.step().copies == []
    copies = loop.step().copies  # the leader has written its 11th token; positions 8 and 9 are the prompt's
    tables = [loop.sequences[name].block_table for name in ("r.0", "r.1", "r.2")]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 3
    assert copies == [(tables[0][2], tables[1][2]), (tables[0][2], tables[2][2])]
    assert loop.plans == [{"r.0": 10}, {"r.0": 1, "r.1": 1, "r.2": 1}]
    loop.run()
    assert loop.plans[2:4] == [{"r.0": 1, "r.1": 1, "r.2": 1}, {"r.1": 1, "r.2": 1, "r.3": 2}]
    assert (
        loop.scheduler.num_cached_tokens == 9 + 9 + 8
    )  # r.3 entered when the leader had left: full blocks only


def test_a_follower_of_a_prompt_that_fills_its_blocks_copies_none() -> None:
    loop = Loop(num_blocks=32, block_size=4, budget=16)
    loop.add(request("r", 9, 3, n=2))
    loop.run()
    assert loop.plans[1] == {"r.0": 1, "r.1": 1}
    loop.add(request("full", 8, 3, n=2))
    loop.step()
    assert len(loop.step().copies) == 1  # its last token is computed again, into a block of its own
    loop.run()


def test_equal_prefixes_are_computed_once() -> None:
    loop = Loop(num_blocks=32, block_size=4, budget=64)
    loop.add(request("first", 18, 2, topic="t"))
    loop.run()
    loop.add(request("longer", 30, 2, topic="t"), request("equal", 18, 2, topic="t"), request("other", 18, 2))
    loop.step()
    assert loop.plans[-1] == {"longer": 14, "equal": 2, "other": 18}
    loop.run()
    loop.add(request("within", 16, 1, topic="t"))  # a whole number of blocks: at least one token is computed
    loop.step()
    assert loop.plans[-1] == {"within": 4}


def test_what_was_used_last_is_kept_longest_and_tails_go_first() -> None:
    loop = Loop(num_blocks=8, block_size=4, slots=1, budget=64)
    for name in ("old", "new"):
        loop.add(request(name, 12, 1))
        loop.run()
    loop.add(request("large", 16, 1))  # two free blocks and two of "old", its last ones
    loop.run()
    loop.add(request("more of old", 13, 1, topic="old"))
    loop.run()
    assert loop.plans[-1] == {"more of old": 9}


ACTIONS = st.lists(
    st.one_of(
        st.builds(
            request,
            st.just(""),
            prompt=st.integers(1, 40),
            max_tokens=st.integers(1, 30),
            priority=st.integers(0, 2),
            n=st.sampled_from([1, 1, 2, 3]),
            topic=st.sampled_from(["a", "b", None]),
        ),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("abort"), st.integers(0, 5)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    actions=ACTIONS,
    num_blocks=st.integers(1, 12),
    block_size=st.sampled_from([1, 4, 7]),
    slots=st.integers(1, 5),
    extra_budget=st.integers(0, 12),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_every_request_ends_once_and_nothing_leaks(
    actions: list[Request | tuple[str, int]],
    num_blocks: int,
    block_size: int,
    slots: int,
    extra_budget: int,
    policy: str,
) -> None:
    loop = Loop(num_blocks, block_size, slots, slots + extra_budget, policy)
    asked: dict[str, Request] = {}
    for index, action in enumerate(actions):
        if isinstance(action, Request):
            new = replace(action, id=f"r{index}")
            if new.num_prompt_tokens <= loop.scheduler.blocks.capacity:
                loop.add(new)
                asked |= {name: new for name, sequence in loop.sequences.items() if sequence.id == new.id}
            else:
                with pytest.raises(RequestError):
                    loop.add(new)
        elif action[0] == "step":
            for _ in range(action[1]):
                loop.step()
        elif live := sorted({sequence.id for sequence in loop.sequences.values()}):
            gone = live[action[1] % len(live)]
            loop.abort(gone)
            asked = {name: new for name, new in asked.items() if new.id != gone or name in loop.ended}
    loop.run()
    assert loop.ended.keys() == asked.keys()
    room = loop.scheduler.blocks.capacity + 1
    for name, new in asked.items():
        assert loop.ended[name] == min(new.max_tokens[0], room - new.num_prompt_tokens)
    assert loop.scheduler.blocks.num_used == 0
    assert loop.scheduler.slots.num_free == slots


def test_scheduler_and_dry_run_need_no_torch() -> None:
    code = (
        "import sys, engine, engine.scheduler, engine.dry_run, engine.bulk; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
