"""One leased job: what of it is logged, what is not, and what its result will be."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from broker.calls import Lease
from protocol import (
    FinishReason,
    JobError,
    TerminalState,
    TerminalType,
    TokenEvent,
    TokenLogprob,
    decode_event,
    encode_result,
    encode_terminal,
    encode_token,
)
from worker.frames import Begun, Piece

CHECKPOINT_TOKENS = 64
"""A job that nobody streams is logged every this many tokens: what a crash can cost it."""


@dataclass(slots=True)
class Output:
    """One choice so far, and the tail of it that is not logged."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    unlogged: list[Piece] = field(default_factory=list)

    def grow(self, said: Piece | TokenEvent) -> None:
        """Go on by what was made, or by what was logged of it."""
        self.text.append(said.text)
        self.token_ids += said.token_ids
        self.logprobs += said.logprobs or ()
        if said.prompt_logprobs is not None:
            self.prompt_logprobs = said.prompt_logprobs
        if said.finish_reason is not None:
            self.finish_reason, self.stop_reason = said.finish_reason, said.stop_reason

    def as_choice(self, index: int, unfinished: FinishReason) -> dict[str, object]:
        """The fields of a result's choice; `unfinished` is how it ended if it has no end of its own."""
        return {
            "index": index,
            "text": "".join(self.text),
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason or unfinished,
            "stop_reason": self.stop_reason,
            "logprobs": self.logprobs or None,
            "prompt_logprobs": self.prompt_logprobs,
        }


class Held:
    """A job between its lease and its end. It numbers the job's events, and so owns `seq`."""

    def __init__(self, lease: Lease, log: Iterable[bytes] = ()) -> None:
        self.lease = lease
        self.key = f"{lease.attempt}:{lease.id}"
        """How job and attempt go by in the model process."""
        self.leased_at = time.monotonic()
        self.deadline = math.inf
        """When it is to be stopped, monotonic."""
        if lease.deadline_ms is not None:
            self.deadline = self.leased_at + (lease.deadline_ms - lease.leased_ms) / 1000
        self.next_seq = lease.logged + 1
        self.sent_at: float | None = None
        """When a model process was given it, monotonic: from then on its end may be this job's doing."""
        self.begun: Begun | None = None
        """What the model process said when it accepted the job."""
        self.has_told_end = False
        """Its end is on its way to the server, or there."""
        self.complete = False
        """Every choice has its end."""
        self.error: JobError | None = None
        """Why there will be no more."""
        self._outputs: dict[int, Output] = {}
        for raw in log:
            event = decode_event(raw)
            if isinstance(event, TokenEvent):
                self._output(event.choice).grow(event)

    @property
    def id(self) -> str:
        """The job's id."""
        return self.lease.id

    @property
    def attempt(self) -> int:
        """The fencing token of everything said about the job."""
        return self.lease.attempt

    @property
    def has_retries(self) -> bool:
        """Whether it may be tried again after an error that can pass."""
        return self.lease.retries < self.lease.max_retries

    @property
    def open_choices(self) -> int:
        """Choices that have no end yet; 1 as long as their number is not known."""
        if self.begun is None:
            return 1
        return self.begun.num_choices - sum(
            output.finish_reason is not None for output in self._outputs.values()
        )

    @property
    def written(self) -> list[tuple[list[int], bool]]:
        """(token ids, whether it ended) of each choice, up to the last one that has anything."""
        outputs = self._in_order(0)
        return [(output.token_ids, output.finish_reason is not None) for output in outputs]

    def add(self, piece: Piece) -> None:
        """Take in what a step made."""
        if piece.error_code is not None:
            self.error = JobError(code=piece.error_code, message=piece.error_message or "")
        self.complete = piece.last and self.error is None
        if piece.token_ids or piece.text or piece.finish_reason is not None:
            output = self._output(piece.choice)
            output.grow(piece)
            output.unlogged.append(piece)

    @property
    def unlogged(self) -> bool:
        """Whether there is anything that is not logged."""
        return any(output.unlogged for output in self._outputs.values())

    def due(self) -> bool:
        """Whether something should be logged now."""
        if self.begun is None or self.begun.stream:
            return self.unlogged
        return any(len(output.unlogged) >= CHECKPOINT_TOKENS for output in self._outputs.values())

    def take_events(self) -> tuple[int, list[bytes]]:
        """The seq of the first unlogged event, and all of them; from now on they count as logged."""
        first = self.next_seq
        events = []
        for choice, output in self._outputs.items():
            if output.unlogged:
                events.append(self._event(choice, output.unlogged))
                output.unlogged = []
        return first, events

    def take_end(self, kind: TerminalType, error: JobError | None = None) -> tuple[int, list[bytes]]:
        """As `take_events`, with the terminal event at the end."""
        first, events = self.take_events()
        code, message = (error.code, error.message) if error is not None else (None, None)
        events.append(encode_terminal(self.id, self.next_seq, self.attempt, kind, code, message))
        self.next_seq += 1
        self.has_told_end = True
        return first, events

    def result(self, state: TerminalState, model: str, worker: str, error: JobError | None = None) -> bytes:
        """The result as it is stored, partial where the job did not succeed."""
        begun = self.begun
        unfinished: FinishReason = "cancelled" if state == "cancelled" else "error"
        outputs = self._in_order(begun.num_choices if begun is not None else 0)
        completion_tokens = sum(len(output.token_ids) for output in outputs)
        fields = {
            "id": self.id,
            "state": state,
            "usage": begun and {"prompt_tokens": begun.prompt_tokens, "completion_tokens": completion_tokens},
            "error": error and {"code": error.code, "message": error.message},
            "model": model,
            "seed": begun and begun.seed,
            "attempt": self.attempt,
            "worker": worker,
            "started_at": self.lease.started_ms / 1000,
            "finished_at": self.lease.leased_ms / 1000 + time.monotonic() - self.leased_at,
        }
        return encode_result(
            fields, [output.as_choice(index, unfinished) for index, output in enumerate(outputs)]
        )

    def _event(self, choice: int, pieces: Sequence[Piece]) -> bytes:
        """Pieces of one choice as one event."""
        last = pieces[-1]
        event = encode_token(
            self.id,
            self.next_seq,
            self.attempt,
            choice,
            "".join(piece.text for piece in pieces),
            [token_id for piece in pieces for token_id in piece.token_ids],
            last.finish_reason,
            last.stop_reason,
            [logprob for piece in pieces for logprob in piece.logprobs or ()],
            next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None),
        )
        self.next_seq += 1
        return event

    def _output(self, choice: int) -> Output:
        return self._outputs.setdefault(choice, Output())

    def _in_order(self, num_choices: int) -> list[Output]:
        """The outputs by choice: that many, more where more have something, empty where one has nothing."""
        count = max([num_choices - 1, *self._outputs]) + 1
        return [self._outputs.get(choice) or Output() for choice in range(count)]
