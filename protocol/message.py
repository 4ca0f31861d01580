"""One turn of a chat, in OpenAI's shape."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class TextPart(BaseModel):
    """A piece of a turn's text. Pieces are joined without anything between them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn. Only an assistant's turn that calls tools may have no content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Annotated[str, Field(min_length=1)]
    """Which roles there are is the template's business."""
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """What a reasoning model thought before this turn, for templates that show it."""

    @field_validator("content", mode="before")
    @classmethod
    def _text_alone(cls, content: Any) -> Any:
        """Name what cannot be read, rather than everything it is not."""
        if content is not None and not isinstance(content, str | list | tuple):
            raise ValueError("give text or a list of text parts")
        if isinstance(content, list):
            for index, part in enumerate(content):
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind != "text":
                    raise ValueError(
                        f"part {index}: unsupported content type {kind!r}; only text can be read"
                    )
        return content

    @model_validator(mode="after")
    def _has_something(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing; only an assistant turn with tool_calls may have none")
        return self

    @property
    def text(self) -> str:
        """The content as one text; empty where there is none."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())
