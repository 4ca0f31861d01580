"""A step that the device could not compute changes no answer; what can never be computed fails by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.breaker import FAILED_IN_A_ROW, FIRST_PATIENCE, Breaker, Fault, fault_of
from engine.engine import Engine
from engine.interface import Delta, DeviceLost
from engine.pace import LEAST
from engine.sampling import Drawn, Sampled
from protocol import ErrorCode
from tests.engine.doubles import (
    VOCAB,
    PagedDouble,
    alone,
    assert_empty,
    choices,
    hashed,
    make_engine,
    request,
    run,
    token_ids,
)
from tests.engine.test_overlap import STORIES, assert_same_story, tell
from tests.models import byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

MEMORY = Fault("memory", "OutOfMemoryError: gone")
DEVICE = Fault("device", "AcceleratorError: gone")
PLACES = ("before", "after", "copy", "launch", "read")
"""A forward pass, before and after it has written KV; a copy of blocks; the draw; its reading."""


class Faults:
    """Raises at the given calls, counted by place."""

    def __init__(self, at: set[tuple[str, int]], kind: type[Exception]) -> None:
        self._at = at
        self._kind = kind
        self._count = dict.fromkeys(PLACES, 0)
        self.num_raised = 0

    def reach(self, place: str) -> None:
        self._count[place] += 1
        if (place, self._count[place]) in self._at:
            self.num_raised += 1
            raise self._kind("out of memory" if self._kind is not torch.AcceleratorError else "CUDA error")


@contextmanager
def faulty(faults: Faults) -> Iterator[None]:
    """Every engine of doubles has these faults."""
    forward, copy, read = PagedDouble.forward, PagedDouble.copy_blocks, Drawn.read
    launch: Callable[..., Drawn] = __import__("engine.loop").loop.launch

    def failing_forward(runner: PagedDouble, *args: Any) -> torch.Tensor:
        faults.reach("before")
        logits = forward(runner, *args)
        faults.reach("after")
        return logits

    def failing_copy(runner: PagedDouble, *args: Any) -> None:
        faults.reach("copy")
        copy(runner, *args)

    def failing_launch(*args: Any) -> Drawn:
        faults.reach("launch")
        return launch(*args)

    def failing_read(drawn: Drawn) -> Sampled:
        faults.reach("read")
        return read(drawn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedDouble, "forward", failing_forward)
        patch.setattr(PagedDouble, "copy_blocks", failing_copy)
        patch.setattr("engine.loop.launch", failing_launch)
        patch.setattr(Drawn, "read", failing_read)
        yield


class Obliging(Breaker):
    """Lets fewer run after each fault, and never gives anybody up."""

    def failed(self, *_: Any) -> bool:
        self.sequences = max(1, self.sequences - 1)
        self.tokens = max(LEAST, self.tokens - 1)
        return True


def step_until_it_raises(engine: Engine, deltas: list[Delta]) -> None:
    while engine.has_work():
        deltas += engine.step()


def oblige(engine: Engine) -> None:
    engine._loop._breaker = Obliging(engine.max_num_seqs, engine._scheduler.max_num_batched_tokens)


FAULTS = st.sets(st.tuples(st.sampled_from(PLACES), st.integers(1, 30)), min_size=1, max_size=12)
KINDS = st.sampled_from([torch.OutOfMemoryError, torch.AcceleratorError, MemoryError])


def check_recovery(at: set[tuple[str, int]], kind: type[Exception], overlap: bool, **drawn: Any) -> None:
    undisturbed = tell(**drawn, overlap=False)
    with faulty(Faults(at, kind)):
        disturbed = tell(**drawn, overlap=overlap, prepare=oblige)
    assert_same_story(undisturbed, disturbed)


@settings(max_examples=20, deadline=None)
@given(at=FAULTS, kind=KINDS, overlap=st.booleans(), **STORIES)
def test_any_story_is_told_the_same(at: Any, kind: Any, overlap: bool, **drawn: Any) -> None:
    """Seeds, penalties, stops, grammar, log-probabilities, n, aborts: faults at any place change nothing."""
    check_recovery(at, kind, overlap, **drawn)


@pytest.mark.long
@settings(max_examples=1000, deadline=None)
@given(at=FAULTS, kind=KINDS, overlap=st.booleans(), **STORIES)
def test_any_story_is_told_the_same_at_length(at: Any, kind: Any, overlap: bool, **drawn: Any) -> None:
    check_recovery(at, kind, overlap, **drawn)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", [place for place in PLACES if place != "copy"])
def test_a_full_batch_halves_and_every_answer_is_whole(
    place: str, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [request(f"r{i}", [9 + i] * 12, 12) for i in range(8)]
    expected = [alone(new) for new in requests]
    faults = Faults({(place, 3), (place, 6)}, torch.OutOfMemoryError)
    runner = PagedDouble(hashed, num_kv_blocks=100)
    engine = make_engine(runner, max_num_seqs=8, overlap=overlap)
    with faulty(faults), caplog.at_level(logging.WARNING, "engine"):
        deltas = run(engine, requests)
    assert faults.num_raised == 2
    assert [token_ids(deltas[f"r{i}"]) for i in range(8)] == expected
    assert max(len(step.sizes) for step in runner.steps[-20:]) == 2, "8, then 4, then 2"
    assert len([line for line in caplog.messages if "could not compute" in line]) == 2
    assert engine.stats().preemptions == 8 + 4
    assert_empty(engine)


def test_after_steps_that_went_well_it_grows_again() -> None:
    runner = PagedDouble(hashed, num_kv_blocks=400)
    engine = make_engine(runner, max_num_seqs=4)
    with faulty(Faults({("before", 2)}, torch.OutOfMemoryError)):
        run(engine, [request(f"r{i}", [9 + i] * 4, FIRST_PATIENCE + 30) for i in range(4)])
    widths = [len(step.sizes) for step in runner.steps]
    assert widths[1 : 1 + FIRST_PATIENCE] == [2] * FIRST_PATIENCE
    assert widths[1 + FIRST_PATIENCE] == 4


def test_a_request_that_is_too_large_by_itself_fails_alone() -> None:
    """A row of 40 tokens never fits, however it is cut; its neighbours and those after it are answered."""

    def too_large(sequences: list[list[int]]) -> torch.Tensor:
        if any(len(tokens) > 40 for tokens in sequences):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return hashed(sequences)

    small = [request(f"small{i}", [9 + i] * 6, 10) for i in range(3)]
    engine = make_engine(PagedDouble(too_large), tokenizer=byte_tokenizer(VOCAB), max_num_seqs=4)
    deltas = run(engine, [*small[:2], request("large", [50] * 38, 20), small[2]])
    for new in small:
        assert token_ids(deltas[new.id]) == alone(new)
    last = deltas["large"][-1]
    assert last.error is not None
    assert last.error.code == ErrorCode.DEVICE_ERROR
    assert "Tried to allocate 2.00 GiB" in last.error.message
    assert last.last
    assert sum(len(delta.token_ids) for delta in deltas["large"]) == 3, "what was made until then is told"
    assert_empty(engine)


def test_all_choices_of_a_request_that_fails_alone_end_with_it() -> None:
    def no_memory_for_a_fork(sequences: list[list[int]]) -> torch.Tensor:
        if any(len(tokens) > 12 for tokens in sequences):
            raise torch.OutOfMemoryError("gone")
        return hashed(sequences)

    engine = make_engine(PagedDouble(no_memory_for_a_fork), max_num_seqs=4)
    deltas = run(engine, [request("forked", [5] * 10, 9, n=3, temperature=1.0), request("b", [6] * 3, 9)])
    assert [delta.error is not None for delta in deltas["forked"]].count(True) == 1
    assert deltas["forked"][-1].last
    assert set(choices(deltas["b"])) == {0}
    assert_empty(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_that_fills_the_pool_ends_whole_whichever_step_fails(overlap: bool) -> None:
    """It gives all blocks back in the very step that lets the next one in, and that step fails."""
    requests = [request("large", [5] * 20, 40), request("next", [6] * 20, 6)]
    expected = run(make_engine(PagedDouble(hashed, num_kv_blocks=4)), requests)
    assert len(token_ids(expected["large"])) == 13, "32 tokens fit, and the last needs no room"
    for number in range(1, 17):
        engine = make_engine(PagedDouble(hashed, num_kv_blocks=4), overlap=overlap)
        oblige(engine)
        faults = Faults({("before", number)}, torch.OutOfMemoryError)
        with faulty(faults):
            deltas = run(engine, requests)
        for name in ("large", "next"):
            assert token_ids(deltas[name]) == token_ids(expected[name]), number
        assert (faults.num_raised, deltas["large"][-1].finish_reason) == (1, "length")
        assert_empty(engine)


def test_a_device_without_memory_for_anybody_is_given_up() -> None:
    def none_left(_: list[list[int]]) -> torch.Tensor:
        raise torch.OutOfMemoryError("gone")

    engine = make_engine(PagedDouble(none_left), max_num_seqs=8)
    for number in range(8):
        engine.add(request(f"r{number}", [5] * 4, 4))
    failed: list[Delta] = []
    with pytest.raises(DeviceLost, match="gone"):
        step_until_it_raises(engine, failed)
    assert [delta.error is not None for delta in failed] == [True] * (FAILED_IN_A_ROW - 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_device_that_fails_twice_is_given_up(overlap: bool) -> None:
    engine = make_engine(PagedDouble(hashed), max_num_seqs=8, overlap=overlap)
    engine.add(request("r", [5] * 4, 100))
    faults = Faults({("before", 3), ("before", 9)}, torch.AcceleratorError)
    with faulty(faults), pytest.raises(DeviceLost, match="CUDA error"):
        step_until_it_raises(engine, [])
    assert faults.num_raised == 2


def test_a_device_that_fails_once_is_trusted_but_not_its_memory() -> None:
    """What is cached may be what it failed to write: all of it is computed again."""
    prompt = [5] * 32
    for kind, cached in ((torch.AcceleratorError, 0), (torch.OutOfMemoryError, 24)):
        engine = make_engine(PagedDouble(hashed, block_size=8))
        run(engine, [request("first", prompt, 2)])
        before = engine.stats().cached_tokens
        engine.add(request("other", [7] * 20, 2))
        with faulty(Faults({("before", 1)}, kind)):
            engine.step()
        got = token_ids(run(engine, [request("again", prompt, 9)])["again"])
        assert got == alone(request("again", prompt, 9))
        assert engine.stats().cached_tokens - before == cached


def test_a_fault_of_ours_is_none_of_the_devices() -> None:
    def broken(_: list[list[int]]) -> torch.Tensor:
        raise RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")

    engine = make_engine(PagedDouble(broken))
    engine.add(request("r", [5] * 4, 4))
    with pytest.raises(RuntimeError, match="size of tensor"):
        engine.step()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), "memory"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "memory",
        ),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), "device"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "device"),
        (RuntimeError("expected scalar type Float but found Half"), None),
        (ValueError("out of memory"), None),
    ],
    ids=str,
)
def test_which_errors_are_the_devices(error: Exception, kind: str | None) -> None:
    fault = fault_of(error)
    assert (fault and fault.kind) == kind


def test_the_allocator_of_a_cpu_is_known_by_what_it_really_says() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10**15)
    fault = fault_of(raised.value)
    assert fault is not None
    assert fault.kind == "memory"
    assert "\n" not in fault.message


def test_a_batch_that_never_fits_is_tried_ever_more_rarely() -> None:
    breaker = Breaker(8, 64)
    tries = []
    for step in range(1000):
        if breaker.sequences > 4:
            tries.append(step)
            assert breaker.failed(MEMORY, breaker.sequences, 8)
            assert (breaker.sequences, breaker.tokens) == (4, LEAST)
        else:
            breaker.went_well()
    assert tries == [0, 65, 194, 451, 964]


def test_faults_that_lie_far_apart_are_no_row() -> None:
    breaker = Breaker(8, 64)
    for _ in range(4):
        assert breaker.failed(DEVICE, 8, 64)
        for _ in range(2000):
            breaker.went_well()
    assert (breaker.sequences, breaker.tokens) == (8, 64)
    assert not breaker.failed(MEMORY, 1, LEAST), "one sequence, no more to halve"
