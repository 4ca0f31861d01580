"""A choice's state while it is in the engine, as the scheduler sees it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.interface import Request
from engine.prefix_cache import Prefix


class Sequence:
    """One choice of a request on its way: its tokens, how many of them the KV holds, and what it occupies.

        token_ids    p p p p p p p o o o      p prompt, o output
                     ^^^^^^^^^^^^^ computed   num_computed_tokens = 7: their KV is in `block_table`
                                   ^^^^^      num_uncomputed_tokens = 3: what the coming steps have to catch up with

    A running sequence has a slot and blocks; a waiting one has neither, and nothing computed. A follower is not even
    waiting yet: its leader, another choice of the same prompt, computes the prompt for both.
    """

    __slots__ = (
        "arrival",
        "block_table",
        "choice",
        "followers",
        "leader",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_promised",
        "passed_over",
        "path",
        "prompt",
        "request",
        "slot",
        "token_ids",
        "wanting",
        "wants_prompt_logits",
    )

    def __init__(self, request: Request, choice: int, arrival: int) -> None:
        self.request = request
        self.choice = choice
        self.prompt = request.prompts[request.prompt_of(choice)]
        written = request.written[choice].token_ids if request.written else ()
        self.token_ids: list[int] = [*self.prompt, *written]
        self.num_computed_tokens = 0
        self.num_lost_tokens = 0
        """Tokens it had computed when it was last preempted, while it waits."""
        self.block_table: list[int] = []
        self.path: list[Prefix] = []
        """The prefixes that its first full blocks hold or will hold; see `engine.reuse`, as for the next three."""
        self.wanting = False
        """Whether what its path leads through is wanted by it."""
        self.num_promised = 0
        """Prefixes of its path that it had to have, or to compute, when it began to run."""
        self.num_cached_blocks = 0
        """Blocks of its path that were there when they were last counted."""
        self.slot: int | None = None
        self.arrival = arrival
        """Its number in the order of arrival, from 1; choices of one request follow each other."""
        self.passed_over = 0
        """Later arrivals admitted while this one waited."""
        self.leader: Sequence | None = None
        self.followers: list[Sequence] = []
        """Choices of the same prompt that come in line when it is computed."""
        self.wants_prompt_logits = False
        """Whether the logits of its prompt are still to be seen; then no part of it is taken from the cache."""

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def expect_token(self) -> None:
        """Its next token is being drawn: a 0 stands for it until it is read.

        One step may be planned meanwhile that computes it, and `Scheduler.computed` is told of that step afterwards:
        no block is ever known by a token that has not been read.
        """
        self.token_ids.append(0)

    def learn_token(self, token_id: int) -> None:
        """The token that was expected has been read."""
        self.token_ids[-1] = token_id

    def expect_no_token(self) -> None:
        """The token that was expected is never read: it will be drawn anew."""
        self.token_ids.pop()

    @property
    def has_computed_prompt(self) -> bool:
        return self.num_computed_tokens >= len(self.prompt)

    def __repr__(self) -> str:
        where = f"{self.num_computed_tokens}/{self.num_tokens} slot={self.slot}"
        return f"<Sequence {self.id}.{self.choice} {where}>"


def place(sequence: Sequence) -> tuple[int, int]:
    """Where a sequence stands in any line."""
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
        insort(self._sequences, sequence, key=place)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out.

        Raises:
            ValueError: it does not stand in this line.
        """
        index = bisect_left(self._sequences, place(sequence), key=place)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise ValueError(f"{sequence!r} is not in line")
        del self._sequences[index]

    def window(self, size: int) -> list[Sequence]:
        """The first `size` in line, and the first of each priority that begins further back."""
        front = self._sequences[:size]
        while front:
            index = bisect_left(self._sequences, (front[-1].priority + 1, 0), key=place)
            if index == len(self._sequences):
                break
            front.append(self._sequences[index])
        return front
