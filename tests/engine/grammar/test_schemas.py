"""JSON schemas: every finished output validates, and what cannot be kept is refused with the reason."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench.grammar import Case, Walker, cases, validator
from engine import json_schema
from engine.grammar import MAX_BYTES, Grammars
from protocol import RequestError
from tests.engine.grammar.asking import (
    asked,
    compiled,
    problem,
    refusal,
    schema_asked,
    takes,
)
from tests.models import smollm2_gguf

QUICK = (
    "types",
    "recursive tree",
    "date-time",
    "oneOf tagged",
    "patternProperties",
    "allOf",
    "pydantic",
    "pattern classes",
)


def check_sound(case: Case, grammars: Grammars, walker: Walker, walks: int) -> int:
    """Random outputs validate; right instances are taken and wrong ones not. Returns how many outputs ended."""
    response_format = schema_asked(case.schema)
    valid = validator(case.schema)
    for instances, expected in ((case.valid, True), (case.invalid, False)):
        for instance in instances:
            text = json.dumps(instance, ensure_ascii=False)
            assert takes(grammars, response_format, text, walker) is expected, text
    texts = [walker.walk(compiled(grammars, response_format).matcher(), seed) for seed in range(walks)]
    for text in filter(None, texts):
        assert valid.is_valid(json.loads(text)), text
    return sum(text is not None for text in texts)


@pytest.mark.parametrize("name", QUICK)
def test_every_finished_output_validates(name: str, grammars: Grammars, walker: Walker) -> None:
    (case,) = (case for case in cases() if case.name == name)
    assert check_sound(case, grammars, walker, walks=4) >= 1


@pytest.mark.long
@pytest.mark.model
def test_every_finished_output_validates_or_its_schema_is_refused_by_name() -> None:
    from transformers import AutoTokenizer

    from engine.gguf_cache import converted

    smollm2 = AutoTokenizer.from_pretrained(converted(smollm2_gguf())[0])
    big = Grammars(smollm2, len(smollm2), {smollm2.eos_token_id})
    walker = Walker(smollm2, smollm2.eos_token_id, len(smollm2))
    refused = {}
    for case in cases():
        try:
            big.compile(schema_asked(case.schema))
        except RequestError as error:
            refused[case.name] = error.message
        else:
            assert check_sound(case, big, walker, walks=30) >= 1, case.name
    assert len(refused) <= 14, refused


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": {"a": {"not": {}}}}, "schema.properties.a.not: the keyword 'not'"),
        ({"items": {"if": {}, "then": {}}}, "schema.items.if: the keyword 'if'"),
        ({"allOf": [{}, {"uniqueItems": True}]}, "schema.allOf[1].uniqueItems"),
        ({"$defs": {"d": {"dependentRequired": {}}}}, "schema.$defs.d.dependentRequired"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "object", "minProperties": 2}, "schema.minProperties"),
        ({"multipleOf": 0.01}, "schema.multipleOf: 0.01"),
        ({"items": [{"type": "integer"}]}, "schema.items: a schema is an object"),
        ({"exclusiveMinimum": True}, "schema.exclusiveMinimum"),
        ({"const": ["a\x01"]}, "schema.const: control characters"),
        ({"enum": [{"a\x7f": 1}]}, "schema.enum: control characters"),
        ({"type": "string", "pattern": r"\x01"}, "schema.pattern: control characters"),
        ({"type": "string", "pattern": "(a"}, "schema.pattern: not a regular expression"),
        ({"patternProperties": {"[[:alpha:]]": {}}}, "schema.patternProperties.[[:alpha:]]"),
        (
            {"patternProperties": {r"^\d+$": {"minimum": 5}, "^x$": {}, "^[0-9]+$": {"type": "integer"}}},
            r"schema.patternProperties: '^\\d+$' and '^[0-9]+$' are one pattern here",
        ),
        ({"type": "string", "pattern": "(?=a)"}, "look-ahead"),
        ({"type": "string", "format": "colour"}, "Unknown format: colour"),
        ({"$ref": "https://example.com/s.json"}, "example.com"),
        ({"$ref": "#/x/y", "x": {"y": {}}}, "put it under $defs"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum (5) is greater than maximum (2)"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 3}]}, "oneOf"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "schema.not"),
        (False, "allows nothing"),
        ({"description": "x" * MAX_BYTES}, "too large: 65,5"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_with_the_reason(
    schema: Any, says: str, grammars: Grammars
) -> None:
    message = refusal(grammars, schema_asked(schema))
    assert message.startswith("response_format.json_schema: ")
    assert says in message


@pytest.mark.parametrize(
    ("response_format", "says"),
    [
        (asked("regex", regex="a("), "response_format.regex: not a regular expression"),
        (asked("regex", regex=r"(a)\1"), "response_format.regex: backreferences"),
        (asked("regex", regex="(?i)a"), "flags"),
        (asked("regex", regex="a++a"), "possessive"),
        (asked("regex", regex="[[a]b]"), "ambiguous"),
        (asked("grammar", grammar="start: start"), "refers to itself without an end"),
        (schema_asked({"$ref": "#"}), "refers to itself without an end"),
        (asked("regex", regex="a" * (MAX_BYTES + 1)), "too large"),
        (asked("choice", choice=["a" * MAX_BYTES]), "response_format.choice: too large"),
        (asked("grammar", grammar="start: missing"), 'response_format.grammar: at 1(8): unknown name: "missing"'),
        (asked("grammar", grammar='start: %json {"not": {}}'), "Unimplemented keys"),
        (asked("grammar", grammar='start: %json {"x-guidance": {"lenient": true}, "not": {}}'), "Unimplemented"),
    ],
)  # fmt: skip
def test_another_format_that_cannot_be_compiled_is_refused_too(
    response_format: Any, says: str, grammars: Grammars
) -> None:
    assert says in refusal(grammars, response_format)


MISSHAPEN: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    10**30,
    "",
    "x",
    "date",
    "#",
    "(",
    [],
    [1],
    ["a", "a"],
    [{}],
    {},
    {"a": 1},
    {"(": {}},
)


def test_a_schema_of_any_shape_is_compiled_or_refused(grammars: Grammars) -> None:
    keywords = [*json_schema._CHECKS, *json_schema._LISTS, *json_schema._MAPS, *json_schema._SINGLE]
    keywords += [
        "type",
        "required",
        "format",
        "maxLength",
        "maxItems",
        "minimum",
        "$id",
        "$anchor",
        "x-guidance",
    ]
    rng = random.Random(0)
    pairs = [rng.sample(keywords, 2) for _ in range(150)]
    for names in [*([keyword] for keyword in keywords), *pairs, ["format", "allOf", "pattern"]]:
        for value in rng.sample(MISSHAPEN, 4):
            schema = {name: rng.choice(MISSHAPEN) for name in names} | {names[0]: value}
            message = problem(grammars, schema_asked(schema))
            assert message is None or message.startswith("response_format.json_schema: "), schema
    for format_ in (["date"], {"a": 1}, 3):
        assert "format" in refusal(grammars, schema_asked({"format": format_}))
    assert "allOf" in refusal(grammars, schema_asked({"format": "date", "pattern": "a", "allOf": 3}))


def nested(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_a_schema_nested_too_deep_is_refused(grammars: Grammars) -> None:
    assert "nested deeper" in refusal(grammars, schema_asked(nested(100)))


CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1800)}
OVERFLOW = {"$defs": {**CHAIN, "d1800": {}}, "$ref": "#/$defs/d0"}
EXPLOSION = {"allOf": [{"type": "string", "pattern": "a.{%d}b" % n} for n in range(20)]}  # noqa: UP031


@pytest.mark.parametrize("schema", [OVERFLOW, EXPLOSION], ids=["stack", "time"])
def test_a_schema_that_blows_up_costs_only_its_own_row(
    schema: Any, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("engine.grammar_trial.SECONDS", 0.3)
        assert "too complex" in refusal(grammars, schema_asked(schema))
    assert grammars.compile(schema_asked({"title": str(len(schema)), "type": "null"})) is not None


def test_the_page_names_every_keyword_that_is_refused() -> None:
    page = (Path(__file__).parents[3] / "docs" / "sampling.md").read_text()
    assert [keyword for keyword in json_schema._REFUSED if f"`{keyword}`" not in page] == []
