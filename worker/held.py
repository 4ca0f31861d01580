"""One leased job: what of it is logged, what is not, and what its result will be."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.calls import Lease
from protocol import (
    Choice,
    JobError,
    Result,
    TerminalState,
    TerminalType,
    TokenEvent,
    Usage,
    decode_event,
    encode_terminal,
    encode_token,
)
from protocol.event import FinishReason
from worker.frames import Piece

CHECKPOINT_TOKENS = 64
"""A job that nobody streams is logged every this many tokens: what a crash can cost it."""


@dataclass(slots=True)
class Output:
    """One choice so far: what is logged, and the tail that is not."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    unlogged_text: str = ""
    unlogged_ids: list[int] = field(default_factory=list)


class Held:
    """A job between its lease and its end. It numbers the job's events, and so owns `seq`."""

    def __init__(self, lease: Lease, log: Sequence[bytes] = ()) -> None:
        self.lease = lease
        self.leased_at = time.monotonic()
        self.next_seq = lease.logged + 1
        self.stream = True
        self.begun = False
        self.prompt_tokens: int | None = None
        self.seed: int | None = None
        self._outputs: dict[int, Output] = {}
        for raw in log:
            event = decode_event(raw)
            if isinstance(event, TokenEvent):
                output = self._output(event.choice)
                output.text.append(event.text)
                output.token_ids += event.token_ids

    @property
    def id(self) -> str:
        """The job's id."""
        return self.lease.id

    @property
    def key(self) -> str:
        """How job and attempt go by in the model process."""
        return f"{self.lease.attempt}:{self.lease.id}"

    @property
    def attempt(self) -> int:
        """The fencing token of everything said about the job."""
        return self.lease.attempt

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first choice so far."""
        return self._output(0).token_ids

    def add(self, piece: Piece) -> None:
        """Take in a step's tokens."""
        output = self._output(piece.choice)
        output.text.append(piece.text)
        output.token_ids += piece.token_ids
        output.unlogged_text += piece.text
        output.unlogged_ids += piece.token_ids
        output.finish_reason = piece.finish_reason  # type: ignore[assignment]  # the engine's own word
        output.stop_reason = piece.stop_reason

    @property
    def unlogged(self) -> bool:
        """Whether there is anything that is not logged."""
        return any(output.unlogged_ids or output.unlogged_text for output in self._outputs.values())

    def due(self) -> bool:
        """Whether something should be logged now."""
        if self.stream:
            return self.unlogged
        return any(len(output.unlogged_ids) >= CHECKPOINT_TOKENS for output in self._outputs.values())

    def take_events(self) -> tuple[int, list[bytes]]:
        """The seq of the first unlogged event, and all of them; from now on they count as logged."""
        first = self.next_seq
        events = []
        for choice, output in self._outputs.items():
            if not (output.unlogged_ids or output.unlogged_text):
                continue
            events.append(
                encode_token(
                    self.id,
                    self.next_seq,
                    self.attempt,
                    choice,
                    output.unlogged_text,
                    output.unlogged_ids,
                    output.finish_reason,
                    output.stop_reason,
                )
            )
            self.next_seq += 1
            output.unlogged_text, output.unlogged_ids = "", []
        return first, events

    def take_end(
        self, kind: TerminalType, code: str | None = None, message: str | None = None
    ) -> tuple[int, list[bytes]]:
        """As `take_events`, with the terminal event at the end."""
        first, events = self.take_events()
        events.append(encode_terminal(self.id, self.next_seq, self.attempt, kind, code, message))
        self.next_seq += 1
        return first, events

    def result(self, state: TerminalState, model: str, worker: str, error: JobError | None = None) -> Result:
        """The result, partial where the job did not succeed."""
        choices = [
            Choice(
                index=index,
                text="".join(output.text),
                token_ids=output.token_ids,
                finish_reason=output.finish_reason or ("cancelled" if state == "cancelled" else "error"),
                stop_reason=output.stop_reason,
            )
            for index, output in sorted(self._outputs.items())
        ]
        usage = None
        if self.prompt_tokens is not None:
            completion_tokens = sum(len(choice.token_ids) for choice in choices)
            usage = Usage(prompt_tokens=self.prompt_tokens, completion_tokens=completion_tokens)
        elapsed_s = time.monotonic() - self.leased_at
        return Result(
            id=self.id,
            state=state,
            choices=choices,
            usage=usage,
            error=error,
            model=model,
            seed=self.seed,
            attempt=self.attempt,
            worker=worker,
            started_at=self.lease.started_ms / 1000,
            finished_at=self.lease.leased_ms / 1000 + elapsed_s,
        )

    def _output(self, choice: int) -> Output:
        return self._outputs.setdefault(choice, Output())
