"""A job: what a producer asks for."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from protocol.sampling import SamplingParams

Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")

JobId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:@-]{1,200}$")]
"""Ids are ours or a service's, never a user's free text: they stand in key names."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{1,100}$")]
"""Tenant, run and queue names: no colon, so that keys read back without ambiguity."""

DEFAULT_RESULT_TTL_S = 7 * 24 * 3600.0


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Annotated[str, Field(min_length=1)]
    content: str


class Job(BaseModel):
    """One prompt with its parameters. Exactly one of `prompt` and `messages` is given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: Literal[1] = 1
    id: JobId
    prompt: str | Annotated[list[Annotated[int, Field(strict=True)]], Field(min_length=1)] | None = None
    """Text, or token ids of the model's own tokenizer."""
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    """A chat, rendered by the model's own template."""
    params: SamplingParams = SamplingParams()
    priority: Priority = "normal"
    tenant: Name = "default"
    run: Name | None = None
    """The bulk run this job belongs to; its completion is announced on that run's stream."""
    model: str | None = None
    """Refuse to be answered by a model of another name. None: whatever the queue serves."""
    stream: bool = True
    """False: nobody watches token by token, so the log is written in larger pieces."""
    result_ttl_s: Annotated[float, Field(ge=0)] | None = DEFAULT_RESULT_TTL_S
    """How long the result is kept after the end, in seconds. 0 or None: until it is deleted."""

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        return self

    @property
    def seed(self) -> int:
        """The seed its draws use: the one given, or one made from the id (so it survives crashes and retries)."""
        if self.params.seed is not None:
            return self.params.seed
        return int.from_bytes(hashlib.blake2b(self.id.encode(), digest_size=8).digest(), "big")

    def encode(self) -> bytes:
        """The payload as stored: compact JSON, defaults left out."""
        return self.model_dump_json(exclude_defaults=True).encode()

    @classmethod
    def decode(cls, payload: bytes | str) -> Job:
        """Read a stored payload.

        Raises:
            pydantic.ValidationError: it is not a job of this version.
        """
        return cls.model_validate_json(payload)

    @staticmethod
    def digest(payload: bytes) -> str:
        """What tells two payloads apart: 128 bits of BLAKE2b, hex."""
        return hashlib.blake2b(payload, digest_size=16).hexdigest()


def describe_validation(error: Any) -> str:
    """One line from a pydantic `ValidationError`: each field with what is wrong with it."""
    parts = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            parts.append(f"{where}: no such parameter")
            continue
        parts.append(f"{where}: {item['msg']}" if where else str(item["msg"]))
    return "; ".join(parts)
