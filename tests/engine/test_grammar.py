"""Structured output: what a grammar lets through is what was asked for, and what cannot be kept is refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pydantic import TypeAdapter

from bench.grammar import Case, Walker, accepts, cases, validator
from engine import grammar as grammar_module
from engine import json_schema, regex
from engine.grammar import MAX_BYTES, CompiledGrammar, Grammars
from engine.interface import Matcher
from protocol import ErrorCode, RequestError, ResponseFormat
from tests.models import byte_tokenizer, smollm2_gguf

EOS = 2
VOCAB_SIZE = 259
FORMATS: TypeAdapter[Any] = TypeAdapter(ResponseFormat)
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


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(VOCAB_SIZE)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, VOCAB_SIZE, {EOS})


@pytest.fixture(scope="module")
def walker(tokenizer: Any) -> Walker:
    return Walker(tokenizer, EOS, VOCAB_SIZE)


def asked(kind: str, **fields: Any) -> Any:
    return FORMATS.validate_python({"type": kind, **fields})


def schema_asked(schema: Any) -> Any:
    return asked("json_schema", json_schema={"schema": schema})


def compiled(grammars: Grammars, response_format: Any) -> CompiledGrammar:
    grammar = grammars.compile(response_format)
    assert grammar is not None
    return grammar


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    mask: npt.NDArray[np.int32] = np.full((vocab_size + 31) // 32, -1, dtype=np.int32)
    matcher.allowed(mask)
    return set(np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist())


def takes(grammars: Grammars, response_format: Any, text: str, walker: Walker) -> bool:
    """Whether the text is a whole output."""
    matcher = compiled(grammars, response_format).matcher()
    return accepts(matcher, walker.tokenizer.encode(text, add_special_tokens=False), walker)


def problem(grammars: Grammars, response_format: Any) -> str | None:
    """Why it is refused, on one line; None where it compiles."""
    try:
        grammars.compile(response_format)
    except RequestError as error:
        return error.message
    return None


def refusal(grammars: Grammars, response_format: Any) -> str:
    with pytest.raises(RequestError) as raised:
        grammars.compile(response_format)
    assert raised.value.code is ErrorCode.INVALID_REQUEST
    assert "\n" not in raised.value.message
    return raised.value.message


# Formats


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


@pytest.mark.parametrize(
    "pattern",
    ["a|bc", "^ab?$", "(x|y){2,3}", r"\d+-\w", r"[^a]", r"\S\s\W", "a/b", r"\.\*", ".", "[a-c]?z", "(?:ab)*"],
)
def test_a_regex_matches_the_whole_output_as_python_does(
    pattern: str, grammars: Grammars, walker: Walker
) -> None:
    texts = [
        "".join(chars)
        for n in range(4)
        for chars in itertools.product("abxyz1-. /*\u00e9\u0663\u00bd\n", repeat=n)
    ]
    texts = [
        *random.Random(0).sample(texts, 150),
        "a",
        "bc",
        "ab",
        "1-a",
        "a/b",
        ".*",
        "xy",
        "abab",
        "-",
        "a -",
    ]
    right = {text for text in texts if re.fullmatch(pattern, text)}
    taken = {text for text in texts if takes(grammars, asked("regex", regex=pattern), text, walker)}
    assert taken <= right
    assert {text for text in right if text.isascii()} <= taken


ODD_PARTS = (
    *"ab-][^&~|().*+?$:k3z #{}",
    *(r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\]", r"\-", "(?i:", "(?x:", "(?:", "\u0130", "\u00e9"),
)
ODD_TEXTS = (
    *"abkKi3z -][^&~|#:_{(,`",
    *(
        "\u0130",
        "\u0131",
        "\u00e9",
        "\u0663",
        "\u00bd",
        "\u00b2",
        "\u2001",
        "\x1c",
        "\x85",
        "\u212a",
        "\u017f",
    ),
    *("a]", "b]", "]]", "-]", "ab", "a\u0663", "\u2001a"),
)


def odd_patterns(seed: int, count: int) -> list[str]:
    """Patterns that Python reads, most of them classes: there the two syntaxes have most to disagree on."""
    rng = random.Random(seed)
    patterns: list[str] = []
    while len(patterns) < count:
        some = "".join(rng.choices(ODD_PARTS, k=rng.randint(1, 6)))
        pattern = rng.choice(["{}", "[{}]", "[^{}]", "[^{}]]", "[{}]]", "(?i:[{}])"]).replace("{}", some)
        with contextlib.suppress(re.error), warnings.catch_warnings(action="ignore"):
            re.compile(pattern)
            patterns.append(pattern)
    return patterns


KNOWN_ODD = [
    r"[^\s]+",
    r"[^\d]",
    r"[^\w]",
    r"[^\D\s]",
    "[a[b]]",
    "[^[a]]",
    "[]-a]",
    "[^--a]",
    "(?x:[^a b])",
    "(?i:[^i])",
]


def check_odd_patterns(patterns: list[str], grammars: Grammars, walker: Walker) -> None:
    kept = 0
    for pattern in patterns:
        try:
            grammars.compile(asked("regex", regex=pattern))
        except RequestError:
            continue
        kept += 1
        for text in ODD_TEXTS:
            if not re.fullmatch(pattern, text):
                assert not takes(grammars, asked("regex", regex=pattern), text, walker), (pattern, text)
    assert kept > len(patterns) // 2


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Python's, of classes that are refused here
def test_a_regex_takes_nothing_that_python_does_not(grammars: Grammars, walker: Walker) -> None:
    check_odd_patterns([*KNOWN_ODD, *odd_patterns(0, 60)], grammars, walker)
    for pattern, text in [
        (r"[^\s]+", "a1"),
        (r"[^\d]", "a"),
        (r"[^\W]", "a"),
        ("[]-a]", "`"),
        ("[]a]", "]"),
        ("(?i:yes)", "YES"),
    ]:
        assert takes(grammars, asked("regex", regex=pattern), text, walker), pattern


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_regex_takes_nothing_that_python_does_not_at_length(grammars: Grammars, walker: Walker) -> None:
    check_odd_patterns(odd_patterns(1, 3000), grammars, walker)


def test_reading_a_pattern_leaves_warnings_alone() -> None:
    """The filters belong to the process: the model's thread may warn at the same moment."""
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        inside = list(warnings.filters)
        for pattern in [*KNOWN_ODD, *odd_patterns(2, 300), "[[a]b]", "[a&&b]", "[a--b]"]:
            with contextlib.suppress(ValueError):
                regex.common(pattern)
            assert warnings.filters == inside
    assert [str(one.message) for one in warned] == []
    assert warnings.filters == before


def test_whitespace_in_json_ends(grammars: Grammars, tokenizer: Any) -> None:
    matcher = compiled(grammars, asked("json_object")).matcher()
    matcher.push(tokenizer.encode("{")[0])
    line_feed, space = (tokenizer.convert_tokens_to_ids(token) for token in ("\u010a", "\u0120"))
    matcher.push(line_feed)
    for _ in range(20):
        assert space in allowed(matcher)
        matcher.push(space)
    assert not allowed(matcher) & {space, line_feed}


# Soundness


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


# Refusals


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


def test_a_refused_token_says_why(grammars: Grammars) -> None:
    matcher = compiled(grammars, asked("regex", regex="ab")).matcher()
    with pytest.raises(RequestError, match=r"does not allow token 3 here: \w") as raised:
        matcher.push(3)
    assert "\n" not in raised.value.message


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
        patched.setattr("engine.grammar_trial.SECONDS", 1.0)
        assert "too complex" in refusal(grammars, schema_asked(schema))
    assert grammars.compile(schema_asked({"title": str(len(schema)), "type": "null"})) is not None


# Matchers


def test_where_a_grammar_is_complete_every_end_is_allowed(tokenizer: Any) -> None:
    several = Grammars(tokenizer, VOCAB_SIZE, {EOS, 1, 9999})
    matcher = compiled(several, asked("regex", regex="ab?")).matcher()
    a, b = tokenizer.encode("ab")
    assert allowed(matcher) == {a}
    matcher.push(a)
    assert allowed(matcher) == {b, 1, EOS}
    for token_id in (EOS, 1, b):  # an end changes nothing
        matcher.push(token_id)
    assert allowed(matcher) == {1, EOS}


def test_a_token_that_is_not_allowed_is_an_error(grammars: Grammars, tokenizer: Any) -> None:
    matcher = compiled(grammars, asked("choice", choice=["ab"])).matcher()
    with pytest.raises(RequestError, match="does not allow token"):
        matcher.push(tokenizer.encode("b")[0])


@pytest.mark.parametrize("vocab_size", [200, 330])
def test_logits_may_be_wider_or_narrower_than_the_tokenizer(vocab_size: int, tokenizer: Any) -> None:
    sized = Grammars(tokenizer, vocab_size, {EOS})
    free = compiled(sized, asked("regex", regex="(.|\n)*")).matcher()
    assert max(allowed(free, vocab_size)) < min(vocab_size, VOCAB_SIZE)


def test_a_grammar_that_no_token_can_go_on_with_is_an_error(tokenizer: Any) -> None:
    narrow = Grammars(tokenizer, 30, {EOS})
    assert max(tokenizer.encode("z")) >= 30
    matcher = compiled(narrow, asked("choice", choice=["z"])).matcher()
    with pytest.raises(RequestError, match="leads nowhere"):
        allowed(matcher, 30)


def byte_fallback_tokenizer() -> Any:
    """Sentencepiece's kind: spaces as U+2581, unknown characters as bytes, the first space dropped."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    words = [
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *'abcdefghijklmnopqrstuvwxyz{}":,.',
        "\u2581yes",
    ]
    pieces = {piece: index for index, piece in enumerate(["<unk>", "<s>", "</s>", *words])}
    model = models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )


@pytest.mark.parametrize(
    ("response_format", "right"),
    [
        (asked("choice", choice=["\u00e9 yes", "\u65e5\u672c"]), lambda text: text in ("\u00e9 yes", "\u65e5\u672c")),
        (asked("regex", regex=" a|b"), lambda text: text == "b"),  # no token could write the space
        (asked("json_object"), lambda text: isinstance(json.loads(text), dict)),
    ],
)  # fmt: skip
def test_a_byte_fallback_tokenizer_writes_what_was_asked_for(
    response_format: Any, right: Callable[[str], bool]
) -> None:
    tokenizer = byte_fallback_tokenizer()
    walker = Walker(tokenizer, EOS, len(tokenizer))
    grammar = compiled(Grammars(tokenizer, len(tokenizer), {EOS}), response_format)
    texts = [text for seed in range(5) if (text := walker.walk(grammar.matcher(), seed)) is not None]
    assert texts
    assert all(map(right, texts)), texts


@pytest.mark.long
@pytest.mark.model
def test_smollm2_writes_json_and_no_special_token() -> None:
    from transformers import AutoTokenizer

    from engine.gguf_cache import converted

    smollm2 = AutoTokenizer.from_pretrained(converted(smollm2_gguf())[0])
    eos = smollm2.eos_token_id
    grammar = compiled(Grammars(smollm2, len(smollm2), {eos}), schema_asked({"type": "string"}))
    matcher = grammar.matcher()
    matcher.push(smollm2.encode('"')[0])
    assert not allowed(matcher, len(smollm2)) & set(smollm2.all_special_ids)
    walker = Walker(smollm2, eos, len(smollm2))
    texts = [walker.walk(grammar.matcher(), seed) for seed in range(4)]
    assert all(isinstance(json.loads(text), str) for text in texts if text)


# Compilation


def test_what_was_compiled_is_kept_and_the_oldest_goes(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "MAX_KEPT", 2)
    own = Grammars(tokenizer, VOCAB_SIZE, {EOS})
    a, b, c = (asked("choice", choice=[letter]) for letter in "abc")
    first, second = own.compile(a), own.compile(b)
    assert own.compile(asked("choice", choice=["a"])) is first
    own.compile(c)
    assert own.compile(a) is first
    assert own.compile(b) is not second


def test_a_schema_is_kept_by_what_it_says_in_order(grammars: Grammars) -> None:
    a, b = {"type": "integer"}, {"type": "string"}
    first = grammars.compile(schema_asked({"type": "object", "properties": {"a": a, "b": b}}))
    assert grammars.compile(schema_asked({"type": "object", "properties": {"b": b, "a": a}})) is not first
    named = asked(
        "json_schema", json_schema={"name": "x", "schema": {"type": "object", "properties": {"a": a, "b": b}}}
    )
    assert grammars.compile(named) is first


def test_threads_share_one_compilation(tokenizer: Any, walker: Walker) -> None:
    own = Grammars(tokenizer, VOCAB_SIZE, {EOS})
    start = threading.Barrier(8)

    def ask(number: int) -> tuple[Any, str | None]:
        start.wait()
        shared = compiled(own, schema_asked({"type": "array", "items": {"type": "integer"}, "maxItems": 3}))
        compiled(own, asked("choice", choice=[f"choice {number}"]))
        with pytest.raises(RequestError):
            own.compile(asked("regex", regex="("))
        return shared, walker.walk(shared.matcher(), number)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(ask, range(8)))
    assert len({id(grammar) for grammar, _ in results}) == 1
    alone = [walker.walk(results[0][0].matcher(), number) for number in range(8)]
    assert [text for _, text in results] == alone


def test_nothing_is_imported_or_started_before_it_is_needed() -> None:
    code = (
        "import sys, engine.grammar as g; g.Grammars(object(), 8, {2});"
        "assert not {'llguidance', 'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_library_the_row_says_what_to_install(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    message = refusal(Grammars(tokenizer, VOCAB_SIZE, {EOS}), asked("json_object"))
    assert "pip install 'millstream[worker]'" in message


class SlowTokenizer:
    """No fast backend."""


def test_a_tokenizer_that_cannot_be_read_is_named(tokenizer: Any) -> None:
    assert "SlowTokenizer" in refusal(Grammars(SlowTokenizer(), VOCAB_SIZE, {EOS}), asked("json_object"))
    assert "no end-of-sequence" in refusal(Grammars(tokenizer, VOCAB_SIZE, ()), asked("json_object"))


def test_the_page_names_every_keyword_that_is_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()
    assert [keyword for keyword in json_schema._REFUSED if f"`{keyword}`" not in page] == []
