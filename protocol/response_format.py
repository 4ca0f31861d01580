"""What an output must look like.

    {"type": "text"}                                                      anything
    {"type": "json_object"}                                               one JSON object
    {"type": "json_schema", "json_schema": {"name": ..., "schema": {}}}   JSON that validates (OpenAI's shape)
    {"type": "regex", "regex": "[0-9]{4}"}                                the whole output matches
    {"type": "choice", "choice": ["yes", "no"]}                           one of these texts
    {"type": "grammar", "grammar": "..."}                                 a context-free grammar

The first three are OpenAI's; the others are what vLLM calls structured outputs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class _Format(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, serialize_by_alias=True, validate_by_name=True
    )


class TextFormat(_Format):
    """No constraint."""

    type: Literal["text"]


class JsonObjectFormat(_Format):
    """Some JSON object."""

    type: Literal["json_object"]


class JsonSchema(_Format):
    """A schema under OpenAI's names. `strict` is accepted and always true of what comes out."""

    name: str = "schema"
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(_Format):
    """JSON that validates against a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(_Format):
    """Text that a regular expression matches as a whole."""

    type: Literal["regex"]
    regex: Annotated[str, Field(min_length=1)]


class ChoiceFormat(_Format):
    """One of several texts."""

    type: Literal["choice"]
    choice: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(min_length=1),
        BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    ]


class GrammarFormat(_Format):
    """Text that a context-free grammar derives."""

    type: Literal["grammar"]
    grammar: Annotated[str, Field(min_length=1)]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat | GrammarFormat,
    Field(discriminator="type"),
]
