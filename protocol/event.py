"""What is said while a job runs.

A job's events are numbered from 1 without a gap (`seq`). The log holds them in order, the channel carries the same
bytes live. The last one is terminal.

    seq   1      2      3            4
        token  token  token(finish) done
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from protocol.logprobs import TokenLogprob

TerminalType = Literal["done", "error", "cancelled", "expired", "dead"]
FinishReason = Literal["stop", "length", "cancelled", "error"]


class TokenEvent(BaseModel):
    """New tokens of one choice. `text` may be empty: a character is sent once it is whole."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Literal["token"] = "token"
    id: str
    seq: int
    attempt: int
    choice: int = 0
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for an end-of-sequence token."""
    logprobs: list[TokenLogprob] | None = None
    """One an id, where asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """With the first tokens of a prompt's first choice, where asked for: one a prompt token; None for the first."""


class TerminalEvent(BaseModel):
    """The end of a job; nothing follows it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: TerminalType
    id: str
    seq: int
    attempt: int
    code: str | None = None
    message: str | None = None


Event = Annotated[TokenEvent | TerminalEvent, Field(discriminator="type")]


class _Token(msgspec.Struct, tag_field="type", tag="token", omit_defaults=True, gc=False):
    """A `TokenEvent` as a worker writes it, as `StoredResult` is a `Result`."""

    id: str
    seq: int
    attempt: int
    choice: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: Sequence[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None


class _Terminal(msgspec.Struct, omit_defaults=True, gc=False):
    """A `TerminalEvent`, likewise."""

    type: TerminalType
    id: str
    seq: int
    attempt: int
    code: str | None = None
    message: str | None = None


_TOKEN_PREFIX = '{"type":"token"'
_PREFIX_LENGTH = len(_TOKEN_PREFIX)
_ENCODER = msgspec.json.Encoder()
_EVENT: TypeAdapter[TokenEvent | TerminalEvent] = TypeAdapter(Event)


def decode_event(raw: bytes | str) -> TokenEvent | TerminalEvent:
    """Read an event from the log or the channel.

    Raises:
        pydantic.ValidationError: it is no event.
    """
    return _EVENT.validate_json(raw)


def is_token(raw: bytes | str) -> bool:
    """Whether an event is a token event, without reading it: one with log-probabilities can be large."""
    return raw[:_PREFIX_LENGTH] in (_TOKEN_PREFIX, _TOKEN_PREFIX.encode())


def encode_token(
    job_id: str,
    seq: int,
    attempt: int,
    choice: int,
    text: str,
    token_ids: Sequence[int],
    finish_reason: str | None = None,
    stop_reason: str | int | None = None,
    logprobs: Sequence[TokenLogprob] | None = None,
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None,
) -> bytes:
    """A token event as bytes. The worker calls this for every running job at every step, so no model is built."""
    return _ENCODER.encode(
        _Token(
            job_id,
            seq,
            attempt,
            choice,
            text,
            token_ids,
            finish_reason,
            stop_reason,
            logprobs or None,
            prompt_logprobs or None,
        )
    )


def encode_terminal(
    job_id: str,
    seq: int,
    attempt: int,
    kind: TerminalType,
    code: str | None = None,
    message: str | None = None,
) -> bytes:
    """A terminal event as bytes."""
    return _ENCODER.encode(_Terminal(kind, job_id, seq, attempt, code, message))
