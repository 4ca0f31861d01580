"""Slots, and who gets the next one.

A slot is a place in the running batch (an index below `max_num_seqs`). Slots are all alike, so fitting is about
what is scarce behind them, KV blocks. A policy decides which waiting sequence takes a free slot:

    12 blocks free         a: 20    b: 4    c: 11    d: 6     blocks each needs, in order of (priority, arrival)
    first-fit                       b                          the first that fits
    best-fit                                c                  the one that fits and leaves the fewest free
    priority               (nobody: a is first, and a does not fit yet)

First-fit and best-fit let the small pass the large, but not for ever: a sequence that `patience` later arrivals
have passed, of whatever priority, is next, and nobody enters until it does.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Protocol

from engine.blocks import IntegrityError
from engine.sequence import Line, Sequence

WINDOW = 128
"""How far down the line is looked; it bounds the cost of an admission under a deep backlog. With 64, rows that share
a document are found less often and take a tenth more steps (bench.pressure); a step with a full pool is planned in
0.2 ms in place of 0.3."""


class AdmissionPolicy(Protocol):
    """Chooses among waiting sequences, which are given in order of (priority, arrival)."""

    may_pass: bool
    """Whether it may choose another than the first."""

    def choose(
        self, window: list[Sequence], need: Callable[[Sequence], int], free_blocks: int
    ) -> Sequence | None:
        """The one to admit now, or None; `need` tells how many blocks a sequence takes on admission."""
        ...


class FirstFit:
    """The first in line whose blocks are free."""

    may_pass = True

    def choose(
        self, window: list[Sequence], need: Callable[[Sequence], int], free_blocks: int
    ) -> Sequence | None:
        return next((sequence for sequence in window if need(sequence) <= free_blocks), None)


class BestFit:
    """The one that leaves the fewest blocks free; the earlier of two alike."""

    may_pass = True

    def choose(
        self, window: list[Sequence], need: Callable[[Sequence], int], free_blocks: int
    ) -> Sequence | None:
        needs = [(need(sequence), sequence) for sequence in window]
        fitting = [(blocks, sequence) for blocks, sequence in needs if blocks <= free_blocks]
        return max(fitting, key=itemgetter(0))[1] if fitting else None


class StrictPriority:
    """The first in line or nobody: it is never passed, and room is kept free until it fits."""

    may_pass = False

    def choose(
        self, window: list[Sequence], need: Callable[[Sequence], int], free_blocks: int
    ) -> Sequence | None:
        return window[0] if need(window[0]) <= free_blocks else None


POLICIES: dict[str, type[AdmissionPolicy]] = {
    "first-fit": FirstFit,
    "best-fit": BestFit,
    "priority": StrictPriority,
}


class SlotAllocator:
    """Owns the slots and the order in which waiting sequences get them."""

    def __init__(self, num_slots: int, policy: str = "first-fit", patience: int | None = None) -> None:
        """
        Args:
            num_slots: sequences that can run at once.
            policy: `first-fit`, `best-fit` or `priority`.
            patience: later arrivals that may pass a waiting sequence; `num_slots` if not given.

        Raises:
            ValueError: no such policy, or no slot.
        """
        if policy not in POLICIES:
            raise ValueError(f"admission policy {policy!r} is unknown: choose one of {', '.join(POLICIES)}")
        if num_slots < 1:
            raise ValueError(f"at least one slot is needed, got {num_slots}")
        self.num_slots = num_slots
        self._policy = POLICIES[policy]()
        self._patience = num_slots if patience is None else patience
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def admit(
        self,
        waiting: Line,
        need: Callable[[Sequence], int],
        free_blocks: int,
        order: Callable[[list[Sequence]], list[Sequence]] = list,
    ) -> Sequence | None:
        """Take the next sequence out of the line and give it a slot; None if nobody can enter now.

        Args:
            waiting: the line.
            need: blocks that a sequence takes on admission.
            free_blocks: blocks that may be taken.
            order: for a policy that may pass, who of the window may be chosen now, the best first.
        """
        if not waiting or not self._free:
            return None
        window = waiting.window(WINDOW)
        candidates = self._due(window) or (order(window) if self._policy.may_pass else window)
        chosen = self._policy.choose(candidates, need, free_blocks) if candidates else None
        if chosen is None:
            return None
        waiting.remove(chosen)
        for sequence in window:
            if sequence.arrival < chosen.arrival:
                sequence.passed_over += 1
        chosen.slot = self._free.pop()
        return chosen

    def release(self, sequence: Sequence) -> None:
        """Take the slot back; it is free for the next admission."""
        if sequence.slot is None:
            raise IntegrityError(f"{sequence!r} has no slot to give back")
        self._free.append(sequence.slot)
        sequence.slot = None

    def check_integrity(self, running: Line) -> None:
        """Check that every slot is either free or held by exactly one running sequence.

        Raises:
            IntegrityError: it is not so.
        """
        held = [sequence.slot for sequence in running]
        if sorted([*self._free, *(slot for slot in held if slot is not None)]) != list(range(self.num_slots)):
            raise IntegrityError(f"slots held {held} and free {self._free} are not 0 to {self.num_slots - 1}")

    def _due(self, window: list[Sequence]) -> list[Sequence]:
        """The sequence whose turn it is because it has been passed often enough, if there is one."""
        if not self._policy.may_pass:
            return []
        overdue = [sequence for sequence in window if sequence.passed_over >= self._patience]
        return sorted(overdue, key=lambda sequence: sequence.arrival)[:1]
