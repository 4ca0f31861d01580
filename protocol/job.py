"""A job: what a producer asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from protocol.message import Message
from protocol.sampling import SamplingParams

Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")

JobId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:@-]{1,200}$")]
"""Ids are ours or a service's, never a user's free text: they stand in key names."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{1,100}$")]
"""Tenant, run and queue names: no colon, so that keys read back without ambiguity."""

Flag = Annotated[bool, Field(strict=True)]
"""Neither "no" nor 1: what is written is what is meant, as in `SamplingParams`."""

DEFAULT_RESULT_TTL_S = 7 * 24 * 3600.0
DEFAULT_MAX_RETRIES = 3
MAX_CHOICES = 1024
"""Most choices of one job: prompts times `n`."""


def _prompt_kind(prompt: Any) -> str:
    if isinstance(prompt, str):
        return "text"
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    return "texts" if isinstance(first, str) else "lists of ids" if isinstance(first, list) else "ids"


LONGEST_S = 100 * 365 * 24 * 3600
"""The longest time from now: 100 years. A server refuses times it cannot add, and only when the job ends."""
LATEST_S = 10**11 - 1
"""The last moment, in the year 5138: in ms it has the 14 digits that Lua writes of a number."""
Duration = Annotated[float, Field(strict=True, ge=0, le=LONGEST_S, allow_inf_nan=False)]
Moment = Annotated[float, Field(strict=True, ge=0, le=LATEST_S, allow_inf_nan=False)]
TokenIds = Annotated[list[Annotated[int, Field(strict=True)]], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[list[TokenIds], Tag("lists of ids")],
    Discriminator(_prompt_kind),
]
"""Text or token ids of the model's own tokenizer; a list of either is that many prompts."""

_ALL_DEFAULTS = SamplingParams()
"""One for all jobs that set none, since it is frozen: pydantic would copy a default deeply, 40 us a job."""


class Job(BaseModel):
    """One request: a prompt, several, or a chat. Exactly one of `prompt` and `messages` is given.

    Choices are numbered through: choice `c` answers prompt `c // n`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: Literal[1] = 1
    id: JobId
    prompt: Prompt | None = None
    add_special_tokens: Flag = True
    """Whether the tokenizer adds what it adds to a text, such as a BOS. Not for a chat: its template writes them."""
    split_special_tokens: Flag = False
    """Read special tokens in the text of prompt and messages as plain text (`<|im_end|>` in scraped data)."""

    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    """A chat, rendered by a template."""
    tools: list[dict[str, Any]] | None = None
    """Functions the model may call, in OpenAI's shape, for the template."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """A Jinja template instead of the model's own; it runs in a sandbox."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the template; not the names in `RESERVED`."""
    add_generation_prompt: Flag | None = None
    """Whether the template opens the assistant's turn. None: yes, unless `continue_final_message`."""
    continue_final_message: Flag = False
    """Leave the last message open: the answer goes on with it."""

    params: SamplingParams = Field(default_factory=lambda: _ALL_DEFAULTS)
    priority: Priority = "normal"
    tenant: Name = "default"
    run: Name | None = None
    """The bulk run this job belongs to; its completion is announced on that run's stream."""
    model: str | None = None
    """Refuse to be answered by a model of another name. None: whatever the queue serves."""
    stream: Flag = True
    """False: nobody watches token by token, so the log is written in larger pieces."""
    result_ttl_s: Duration | None = DEFAULT_RESULT_TTL_S
    """How long the result is kept after the end, in seconds. 0 or None: until it is deleted."""

    not_before: Moment | None = None
    """When it may start, in seconds since the epoch by the server's clock."""
    delay_s: Duration | None = None
    """The same, in seconds from its submission."""
    deadline: Moment | None = None
    """When it is no longer wanted, as `not_before`: it never starts after it, and is stopped at it.
    0 is long ago."""
    deadline_in_s: Duration | None = None
    """The same, in seconds from its submission."""
    max_retries: Annotated[int, Field(strict=True, ge=0, le=100)] = DEFAULT_MAX_RETRIES
    """How often it is tried again after an error that can pass (`protocol.errors.MAY_PASS`)."""

    @model_validator(mode="after")
    def _times(self) -> Self:
        for absolute, relative in (("not_before", "delay_s"), ("deadline", "deadline_in_s")):
            if getattr(self, absolute) is not None and getattr(self, relative) is not None:
                raise ValueError(f"give one of {absolute} and {relative}")
        for start, end in ((self.not_before, self.deadline), (self.delay_s, self.deadline_in_s)):
            if start is not None and end is not None and end <= start:
                raise ValueError("it may start only after its deadline: give a later one")
        return self

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        given = [name for name, default in _CHAT_DEFAULTS.items() if getattr(self, name) != default]
        if self.messages is None and given:
            raise ValueError(f"{only_with(given)} messages")
        if taken := sorted(RESERVED & set(self.chat_template_kwargs or ())):
            raise ValueError(
                f"chat_template_kwargs: {', '.join(taken)} cannot be set there; a template gets its messages, tools "
                "and add_generation_prompt from the fields of these names"
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("give one of add_generation_prompt and continue_final_message")
        if self.num_choices > MAX_CHOICES:
            raise ValueError(f"{self.num_choices} choices asked for (prompts times n), at most {MAX_CHOICES}")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt by itself; empty for a chat."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompt: Any = self.prompt or []
        return [prompt] if prompt and isinstance(prompt[0], int) else prompt

    @property
    def num_choices(self) -> int:
        """Choices the job ends with."""
        return self.params.n * max(1, len(self.prompts))

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


CHAT_ONLY = frozenset(
    {"tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
)
"""Fields that say something of `messages` alone."""
_CHAT_DEFAULTS = {name: Job.model_fields[name].default for name in sorted(CHAT_ONLY)}
RESERVED = frozenset(
    {"self", "conversation", "conversations", "messages", "tools", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""Arguments of what renders a chat (transformers' `apply_chat_template`), or other fields of a job."""


def only_with(names: Sequence[str]) -> str:
    """The names of fields or flags with "goes with" or "go with" after them."""
    *others, last = names
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"{listed} {'go' if others or last.endswith('s') else 'goes'} with"
