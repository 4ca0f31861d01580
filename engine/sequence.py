"""A request's state while it is in the engine."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.interface import Request


class Sequence:
    """One request on its way: its tokens, how many of them the KV holds, and what it occupies.

        token_ids    p p p p p p p o o o      p prompt, o output
                     ^^^^^^^^^^^^^ computed   num_computed_tokens = 7: their KV is in `block_table`
                                   ^^^^^      num_uncomputed_tokens = 3: what the coming steps have to catch up with

    A running sequence has a slot and blocks; a waiting one has neither, and nothing computed.
    """

    __slots__ = (
        "arrival",
        "block_table",
        "num_computed_tokens",
        "passed_over",
        "request",
        "slot",
        "token_ids",
    )

    def __init__(self, request: Request, arrival: int) -> None:
        self.request = request
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.slot: int | None = None
        self.arrival = arrival
        """Its number in the order of `add` calls, from 1."""
        self.passed_over = 0
        """Later arrivals admitted while this one waited."""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def __repr__(self) -> str:
        return f"<Sequence {self.id} {self.num_computed_tokens}/{self.num_tokens} slot={self.slot}>"


def _place(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.priority, sequence.arrival


class Line:
    """Sequences in order of (priority, arrival), found by bisection.

    New arrivals land at the end and a preempted sequence lands where it stood before, so both are cheap.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def last(self) -> Sequence:
        return self._sequences[-1]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_place)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out.

        Raises:
            ValueError: it does not stand in this line.
        """
        index = bisect_left(self._sequences, _place(sequence), key=_place)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise ValueError(f"{sequence!r} is not in line")
        del self._sequences[index]

    def window(self, size: int) -> list[Sequence]:
        """The first `size` in line, and the first of each priority that begins further back."""
        front = self._sequences[:size]
        while front:
            index = bisect_left(self._sequences, (front[-1].priority + 1, 0), key=_place)
            if index == len(self._sequences):
                break
            front.append(self._sequences[index])
        return front
