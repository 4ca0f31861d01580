"""What each sampling parameter takes, in words made of the model itself: for messages, and for docs/sampling.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import ValidationError

from protocol import SamplingParams, describe_validation
from protocol.validation import shortened

_TEXT_OR_TEXTS = frozenset({"stop", "bad_words"})
"""Lists that may be written as a single text."""


@cache
def allowed(name: str) -> str:
    """What a parameter of `SamplingParams` may be: `top_p` takes "a number from 0 to 1"."""
    if name == "response_format":
        kinds = _schema(name)["anyOf"][0]["discriminator"]["mapping"]
        return f'an object like {{"type": "json_object"}}, its type one of {", ".join(sorted(kinds))}'
    words = _words(_schema(name))
    return f"a text or {words}" if name in _TEXT_OR_TEXTS else words


def describe(error: ValidationError) -> str:
    """One line from a `ValidationError` of `SamplingParams`: each field, what it takes, and the value it had."""
    lines = {_describe(item): None for item in error.errors(include_url=False, include_context=False)}
    # What is wrong between fields, and inside an object, has words of its own.
    return describe_validation(error) if None in lines else "; ".join(map(str, lines))


def _describe(item: Any) -> str | None:
    name, *inside = item["loc"] or (None,)
    if item["type"] == "extra_forbidden" and not inside:
        near = get_close_matches(str(name), SamplingParams.model_fields, 1)
        return f"{name}: no such parameter" + (f"; is {near[0]} meant?" if near else "")
    if name not in SamplingParams.model_fields or (name == "response_format" and inside):
        return None
    if inside and inside[-1] == "[key]":
        return f"{name}: give {allowed(name)}; {_shown(item['input'])} is not a token id"
    if inside and not str(inside[0]).startswith(("constrained-", "bool")):  # not a branch of int | bool
        return f"{name}.{inside[0]}: give {_words(_inner(_schema(name)))}, not {_shown(item['input'])}"
    return f"{name}: give {allowed(name)}, not {_shown(item['input'])}"


@cache
def _schema(name: str) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = SamplingParams.model_json_schema()["properties"][name]
    return schema


def _inner(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of what a list or an object holds."""
    for one in schema.get("anyOf", [schema]):
        if inner := one.get("items", one.get("additionalProperties")):
            found: Mapping[str, Any] = inner
            return found
    raise KeyError("neither a list nor an object")


def _words(schema: Mapping[str, Any], plural: bool = False) -> str:
    if "anyOf" in schema:
        return ", or ".join(_words(one) for one in schema["anyOf"] if one["type"] != "null")
    kind = schema["type"]
    if kind == "array":
        return f"a list of {_words(schema['items'], plural=True)}" + (
            ", not empty" if "minItems" in schema else ""
        )
    if kind == "object":
        return f"an object of token ids and {_words(schema['additionalProperties'], plural=True)}"
    if kind == "string":
        return "texts that are not empty" if plural else "a text that is not empty"
    if kind == "boolean":
        return "true or false"
    noun = "whole number" if kind == "integer" else "number"
    return (f"{noun}s" if plural else f"a {noun}") + _range(schema)


def _range(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - 1
    if "exclusiveMinimum" in schema:
        return f" above {schema['exclusiveMinimum']}"
    return f", {low} or more" if high is None else f" from {low} to {high}"


def _shown(value: Any) -> str:
    """A value as JSON, which is how rows and flags write it."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return shortened(text)
