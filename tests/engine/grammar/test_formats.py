"""What a grammar lets through is what was asked for, format by format."""

from __future__ import annotations

from typing import Any

import pytest

from bench.grammar import Walker
from engine.grammar import Grammars
from tests.engine.grammar.asking import (
    allowed,
    asked,
    compiled,
    schema_asked,
    takes,
)


@pytest.mark.parametrize(
    ("response_format", "right", "wrong"),
    [
        (asked("json_object"), ["{}", '{"a": [1, null]}', '{\n  "a": 1\n}'], ["[]", "1", '{"a"}', "", ' {"a":1}']),
        (schema_asked({"type": "integer"}), ["12", "-3"], ["1.5", '"1"', ""]),
        (schema_asked(True), ["12", '{"a":"\u00e9"}'], ["", "x"]),
        (asked("regex", regex="[0-9]{4}"), ["2024"], ["202", "20245", "x2024"]),
        (asked("choice", choice=["yes", "no", "n"]), ["yes", "no", "n"], ["ye", "yess", "", "yesno"]),
        (asked("choice", choice=["\u00e9t\u00e9", "\u65e5\u672c", "\U0001f469\u200d\U0001f467", "a|b.*\n"]),
         ["\u00e9t\u00e9", "\u65e5\u672c", "\U0001f469\u200d\U0001f467", "a|b.*\n"], ["\u00e9", "a", "a|bcc\n"]),
        (asked("grammar", grammar='start: "a" start "b" | "-"'), ["-", "aa-bb"], ["aa-b", "a", ""]),
        (asked("grammar", grammar='root ::= "a" digit+ " "*\ndigit ::= [0-9]'), ["a1", "a12  "], ["a", "b1"]),
    ],
)  # fmt: skip
def test_a_format_takes_what_was_asked_for_and_nothing_else(
    response_format: Any, right: list[str], wrong: list[str], grammars: Grammars, walker: Walker
) -> None:
    assert [text for text in right if not takes(grammars, response_format, text, walker)] == []
    assert [text for text in wrong if takes(grammars, response_format, text, walker)] == []


def test_text_has_no_grammar(grammars: Grammars) -> None:
    assert grammars.compile(asked("text")) is None


def test_whitespace_in_json_ends(grammars: Grammars, tokenizer: Any) -> None:
    matcher = compiled(grammars, asked("json_object")).matcher()
    matcher.push(tokenizer.encode("{")[0])
    line_feed, space = (tokenizer.convert_tokens_to_ids(token) for token in ("\u010a", "\u0120"))
    matcher.push(line_feed)
    for _ in range(20):
        assert space in allowed(matcher)
        matcher.push(space)
    assert not allowed(matcher) & {space, line_feed}
