"""An abort frees all that a request holds, whatever state it is in."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from engine.blocks import IntegrityError
from engine.sequence import Sequence
from tests.engine.doubles import (
    Output,
    PagedDouble,
    alone,
    assert_empty,
    hashed,
    make_engine,
    optimistic,
    request,
    token_ids,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Rounds:
    """Two requests that share a pool with the one that is aborted."""

    def __init__(self) -> None:
        self.runner = PagedDouble(hashed, max_model_len=64, num_kv_blocks=8)
        self.engine = optimistic(make_engine(self.runner, max_num_batched_tokens=16, max_num_seqs=3))
        self.deltas: Output = defaultdict(list)

    def start(self, number: int) -> None:
        """Prompts of different rounds have nothing in common."""
        self.deltas.clear()
        self.others = [request(f"other{i}", [9 + 10 * number + i] * 5, 12) for i in range(2)]
        self.preemptions = self.engine.stats().preemptions
        for new in [*self.others, request("gone", [100 + number] * 30, 34)]:
            self.engine.add(new)

    def sequence(self) -> Sequence:
        """That of the request to be aborted."""
        return self.engine._loop.roster._requests["gone"][0].sequence

    def finish(self) -> None:
        self.until(lambda: not self.engine.has_work())

    def step(self) -> None:
        for delta in self.engine.step():
            self.deltas[delta.request_id].append(delta)

    def until(self, happened: Any) -> None:
        for _ in range(100):
            if happened():
                return
            self.step()
        raise AssertionError("it never happened")


def _abort_waiting(rounds: Rounds) -> None:
    assert rounds.engine.abort("gone")


def _abort_in_a_prefill(rounds: Rounds) -> None:
    rounds.until(lambda: rounds.engine.stats().running == 3)
    sequence = rounds.sequence()
    assert 0 < sequence.num_computed_tokens < sequence.num_tokens
    assert rounds.engine.abort("gone")


def _abort_in_a_forward_pass(rounds: Rounds) -> None:
    rounds.until(lambda: rounds.deltas["gone"])
    rounds.runner.before_forward = lambda: rounds.engine.abort("gone") and None
    rounds.step()
    rounds.runner.before_forward = lambda: None


def _abort_after_a_token(rounds: Rounds) -> None:
    rounds.until(lambda: rounds.deltas["gone"])
    assert rounds.engine.abort("gone")


def _abort_while_preempted(rounds: Rounds) -> None:
    rounds.until(lambda: rounds.engine.stats().preemptions > rounds.preemptions)
    assert rounds.sequence().slot is None
    assert rounds.deltas["gone"]
    assert rounds.engine.abort("gone")


def _abort_twice(rounds: Rounds) -> None:
    assert rounds.engine.abort("gone")
    assert not rounds.engine.abort("gone")


def _abort_after_the_end(rounds: Rounds) -> None:
    rounds.until(lambda: rounds.deltas["gone"] and rounds.deltas["gone"][-1].finish_reason)
    assert not rounds.engine.abort("gone")


ABORTS = [
    _abort_waiting,
    _abort_in_a_prefill,
    _abort_in_a_forward_pass,
    _abort_after_a_token,
    _abort_while_preempted,
    _abort_twice,
    _abort_after_the_end,
]


@pytest.mark.parametrize("abort", ABORTS, ids=lambda abort: abort.__name__.removeprefix("_abort_"))
def test_an_abort_in_any_state_frees_everything(abort: Any) -> None:
    rounds = Rounds()
    for number in range(5):
        rounds.start(number)
        abort(rounds)
        sent = len(rounds.deltas["gone"])
        rounds.finish()
        assert len(rounds.deltas["gone"]) == sent, "a delta after the abort"
        for new in rounds.others:
            assert token_ids(rounds.deltas[new.id]) == alone(new)
        assert_empty(rounds.engine)


def test_what_is_not_given_back_is_noticed_in_the_step_that_leaves_the_engine_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(PagedDouble(hashed))
    engine.add(request("r", [5] * 20, 3))
    monkeypatch.setattr(engine._scheduler.blocks, "free", lambda _: None)
    for _ in range(2):
        engine.step()
    with pytest.raises(IntegrityError):
        engine.step()
