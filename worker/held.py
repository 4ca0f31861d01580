"""One leased job: what of it is logged, what is not, and what its result will be."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from broker.calls import Lease
from protocol import (
    ErrorCode,
    FinishReason,
    JobError,
    StoredChoice,
    StoredResult,
    TerminalState,
    TerminalType,
    TokenEvent,
    TokenLogprob,
    decode_event,
    encode_terminal,
    encode_token,
)
from protocol.sampling import MAX_N
from worker.frames import Begun, Piece

CHECKPOINT_TOKENS = 64
"""A job that nobody streams is logged every this many tokens: what a crash can cost it."""


class Stop(NamedTuple):
    """An end that the model process does not bring a job to."""

    state: Literal["cancelled", "expired", "dead", "failed"]
    error: JobError


CANCELLED = Stop("cancelled", JobError(code=ErrorCode.CANCELLED, message="cancelled while it ran"))
EXPIRED = Stop(
    "expired", JobError(code=ErrorCode.DEADLINE_EXCEEDED, message="its deadline came while it ran")
)


class Output(msgspec.Struct, gc=False):
    """One choice so far, and the tail of it that is not logged."""

    text: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    unlogged: list[Piece] = []

    def grow(self, said: Piece | TokenEvent) -> None:
        """Go on by what was made, or by what was logged of it."""
        self.text.append(said.text)
        self.token_ids += said.token_ids
        self.logprobs += said.logprobs or ()
        if said.prompt_logprobs is not None:
            self.prompt_logprobs = said.prompt_logprobs
        if said.finish_reason is not None:
            self.finish_reason, self.stop_reason = said.finish_reason, said.stop_reason

    def as_choice(self, index: int, unfinished: FinishReason) -> StoredChoice:
        """A result's choice; `unfinished` is how it ended if it has no end of its own."""
        return StoredChoice(
            index=index,
            text="".join(self.text),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason or unfinished,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs or None,
            prompt_logprobs=self.prompt_logprobs,
        )


class Held:
    """A job between its lease and its end. It numbers the job's events, and so owns `seq`."""

    def __init__(self, lease: Lease, number: int) -> None:
        """To be made as soon as the lease's reply is there: deadline and end are reckoned from now.

        Args:
            lease: what the server granted.
            number: another for each lease that the worker takes.
        """
        self.lease = lease
        self.id = lease.id
        self.attempt = lease.attempt
        """The fencing token of everything said about the job."""
        self.key = f"{lease.attempt}:{lease.id}#{number}"
        """How this lease goes by in the model process. A server that lost data may grant an attempt twice."""
        self.leased_at = time.monotonic()
        self.deadline = math.inf
        """When it is to be stopped, monotonic."""
        if lease.deadline_ms is not None:
            self.deadline = self.leased_at + (lease.deadline_ms - lease.leased_ms) / 1000
        self.stop: Stop | None = None
        """How it is to end at once, whatever the model process makes of it."""
        self.next_seq = lease.logged + 1
        self.sent_at: float | None = None
        """When a model process was given it, monotonic."""
        self.may_be_to_blame = False
        """The end of that process may be this job's doing."""
        self.begun: Begun | None = None
        """What the model process said when it accepted the job."""
        self.open_choices = 1
        """Choices that have no end yet; 1 as long as their number is not known."""
        self.has_let_go = False
        """Its end, or its release, is on its way to the server, or there: the lease is over."""
        self.complete = False
        """Every choice has its end."""
        self.error: JobError | None = None
        """Why there will be no more."""
        self._outputs: list[Output] = []
        """By choice, up to the last one that has anything."""
        self._events: list[bytes] = []
        """Numbered, and not taken yet."""

    def go_on_after(self, log: Iterable[bytes]) -> None:
        """Take in what earlier attempts have logged.

        Raises:
            ValueError: there is something that is not an event, or not of this job.
        """
        most_choices = MAX_N * len(self.lease.payload)
        for raw in log:
            event = decode_event(raw)
            if isinstance(event, TokenEvent):
                if not 0 <= event.choice < most_choices:
                    raise ValueError(f"event {event.seq} is of choice {event.choice}")
                self._output(event.choice).grow(event)

    @property
    def stop_at(self) -> float:
        """When it is to be stopped, monotonic; infinite: never."""
        return self.deadline if self.stop is None else -math.inf

    @property
    def has_retries(self) -> bool:
        """Whether it may be tried again after an error that can pass."""
        return self.lease.retries < self.lease.max_retries

    @property
    def written(self) -> list[tuple[list[int], bool]]:
        """(token ids, whether it ended) of each choice, up to the last one that has anything."""
        return [(output.token_ids, output.finish_reason is not None) for output in self._outputs]

    @property
    def is_streamed(self) -> bool:
        """Whether somebody may watch it token by token; not before it has begun."""
        return self.begun is not None and self.begun.stream

    def begin(self, begun: Begun) -> None:
        """The model process has accepted the job."""
        self.begun = begun
        self.open_choices = begun.num_choices
        for output in self._outputs:
            self.open_choices -= output.finish_reason is not None

    def add(self, piece: Piece) -> None:
        """Take in what a step made."""
        if piece.error_code is not None:
            self.error = JobError(code=piece.error_code, message=piece.error_message or "")
        self.complete = piece.last and self.error is None
        if piece.token_ids or piece.text or piece.finish_reason is not None:
            output = self._output(piece.choice)
            output.grow(piece)
            output.unlogged.append(piece)
            if piece.finish_reason is not None and self.begun is not None:
                self.open_choices -= 1

    @property
    def unlogged(self) -> bool:
        """Whether there is anything that is not logged."""
        return bool(self._events) or any(output.unlogged for output in self._outputs)

    @property
    def _needs_log(self) -> bool:
        """Whether the end goes to the log: somebody may stream the job, or a part of it stands there."""
        return self.next_seq > 1 or self.begun is None or self.begun.stream

    def due(self) -> bool:
        """Whether something should be logged now."""
        if self.begun is None or self.begun.stream:
            return self.unlogged
        return any(len(output.unlogged) >= CHECKPOINT_TOKENS for output in self._outputs)

    def take_events(self) -> tuple[int, list[bytes]]:
        """The seq of the first unlogged event, and all of them; from now on they count as logged."""
        self._make_events()
        events, self._events = self._events, []
        return self.next_seq - len(events), events

    def end_step(self) -> None:
        """What comes next is another step's: where the job is streamed, each step's tokens are an event of their own,
        however many steps are told of at once.
        """
        self._make_events()

    def _make_events(self) -> None:
        for choice, output in enumerate(self._outputs):
            if output.unlogged:
                self._events.append(self._event(choice, output.unlogged))
                output.unlogged = []

    def take_end(self, kind: TerminalType, error: JobError | None = None) -> tuple[int, list[bytes]]:
        """As `take_events`, with the terminal event at the end. It is the only one, and its job's first is 0, where
        nobody streams the job and nothing of it is logged: the result says the rest.
        """
        if self._needs_log:
            first, events = self.take_events()
        else:
            first, events = 0, []
            for output in self._outputs:
                self.next_seq += bool(output.unlogged)
        code, message = (error.code, error.message) if error is not None else (None, None)
        events.append(encode_terminal(self.id, self.next_seq, self.attempt, kind, code, message))
        self.next_seq += 1
        self.has_let_go = True
        return first, events

    def result(self, state: TerminalState, model: str, worker: str, error: JobError | None = None) -> bytes:
        """The result as it is stored, partial where the job did not succeed."""
        begun, lease = self.begun, self.lease
        unfinished: FinishReason = "cancelled" if state == "cancelled" else "error"
        usage = None
        if begun is not None:
            self._output(begun.num_choices - 1)
            usage = {"prompt_tokens": begun.prompt_tokens, "completion_tokens": 0}
            for output in self._outputs:
                usage["completion_tokens"] += len(output.token_ids)
        return StoredResult(
            v=1,
            id=lease.id,
            state=state,
            usage=usage,
            error=None if error is None else {"code": error.code, "message": error.message},
            model=model,
            seed=None if begun is None else begun.seed,
            attempt=lease.attempt,
            worker=worker,
            started_at=lease.started_ms / 1000,
            finished_at=lease.leased_ms / 1000 + time.monotonic() - self.leased_at,
            choices=[output.as_choice(index, unfinished) for index, output in enumerate(self._outputs)],
        ).encode()

    def _event(self, choice: int, pieces: Sequence[Piece]) -> bytes:
        """Pieces of one choice as one event."""
        piece = pieces[0] if len(pieces) == 1 else _joined(choice, pieces)
        event = encode_token(
            self.id,
            self.next_seq,
            self.attempt,
            choice,
            piece.text,
            piece.token_ids,
            piece.finish_reason,
            piece.stop_reason,
            piece.logprobs,
            piece.prompt_logprobs,
        )
        self.next_seq += 1
        return event

    def _output(self, choice: int) -> Output:
        """The output of a choice; empty ones are made up to it."""
        while len(self._outputs) <= choice:
            self._outputs.append(Output())
        return self._outputs[choice]


def _joined(choice: int, pieces: Sequence[Piece]) -> Piece:
    """Pieces of one choice as one."""
    last = pieces[-1]
    return Piece(
        last.key,
        choice,
        [token_id for piece in pieces for token_id in piece.token_ids],
        "".join(piece.text for piece in pieces),
        last.last,
        last.finish_reason,
        last.stop_reason,
        [logprob for piece in pieces for logprob in piece.logprobs or ()],
        next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None),
    )
