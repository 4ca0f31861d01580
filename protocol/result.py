"""How a job ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from pydantic import BaseModel, ConfigDict

from protocol.event import FinishReason
from protocol.logprobs import TokenLogprob

State = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired", "dead"]
TerminalState = Literal["succeeded", "failed", "cancelled", "expired", "dead"]
TERMINAL_STATES: frozenset[str] = frozenset({"succeeded", "failed", "cancelled", "expired", "dead"})


class Choice(BaseModel):
    """One completion. Choice `index` answers prompt `index // n`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    index: int = 0
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    """One an id, where asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Where asked for, with the first choice of each prompt: one a prompt token; None for the first."""


class Usage(BaseModel):
    """Tokens read and written, over all prompts and choices.

    A prompt counts once, however many choices it has. `completion_tokens` counts the end-of-sequence token.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    prompt_tokens: int
    completion_tokens: int


class JobError(BaseModel):
    """Why there is no completion."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    code: str
    message: str


class Result(BaseModel):
    """What is stored when a job ends, and kept for its retention."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: Literal[1] = 1
    id: str
    state: TerminalState
    choices: list[Choice] = []
    usage: Usage | None = None
    error: JobError | None = None
    model: str | None = None
    seed: int | None = None
    attempt: int = 0
    worker: str | None = None
    started_at: float | None = None
    """Seconds since the epoch, server clock."""
    finished_at: float | None = None

    @property
    def text(self) -> str:
        """The text of the first choice, empty where there is none."""
        return self.choices[0].text if self.choices else ""

    def encode(self) -> bytes:
        """The result as stored."""
        return self.model_dump_json(exclude_none=True).encode()

    @classmethod
    def decode(cls, raw: bytes | str) -> Result:
        """Read a stored result.

        Raises:
            pydantic.ValidationError: it is no result.
        """
        return cls.model_validate_json(raw)


class StoredChoice(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """A `Choice` as a worker writes it."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: Sequence[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None


class StoredResult(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """A `Result` as a worker writes it, for every job and of what it made itself: nothing is checked, and writing it
    takes 1 us where building the models took 20.
    """

    v: Literal[1]
    id: str
    state: TerminalState
    usage: Mapping[str, int] | None = None
    error: Mapping[str, str] | None = None
    model: str | None = None
    seed: int | None = None
    attempt: int
    worker: str | None = None
    started_at: float | None = None
    finished_at: float | None = None
    choices: Sequence[StoredChoice]

    def encode(self) -> bytes:
        """The result as stored."""
        return _ENCODER.encode(self)


_ENCODER = msgspec.json.Encoder()
