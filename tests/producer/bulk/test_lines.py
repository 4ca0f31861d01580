"""Reading the input: what is a row, what is an error of one line, and that no line harms another."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.bulk import lines
from producer.bulk.intake import ask
from producer.bulk.lines import BadRow, Line, Row, parse, read_lines
from producer.bulk.requests import Requests

DATA = Path(__file__).parents[1] / "data"
REQUESTS = Requests("run", {}, None)


def rows_of(content: bytes) -> list[Row | BadRow]:
    return [parse(line) for line in read_lines(io.BytesIO(content))]


def test_joined_files_of_all_systems_give_every_row_with_its_physical_line() -> None:
    with (DATA / "joined_files.jsonl").open("rb") as file:
        rows = [parse(line) for line in read_lines(file)]
    assert all(isinstance(row, Row) for row in rows)
    assert [(row.line, row.custom_id) for row in rows] == [(1, "a"), (3, "b"), (5, "c"), (7, "d"), (8, "e")]


def test_nothing_but_a_line_feed_ends_a_line() -> None:
    """Not what Unicode, and with it `str.splitlines`, takes for the end of a line."""
    prompts = ["a\u2028b", "\u2029", "a\x85b\x85", "\u2028\u2029\ufeff"]
    content = "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)
    rows = rows_of(content.encode())
    assert [row.columns["prompt"] for row in rows if isinstance(row, Row)] == prompts
    assert [row.line for row in rows] == [1, 2, 3, 4]


def test_every_broken_line_is_an_error_of_its_own() -> None:
    with (DATA / "broken_lines.jsonl").open("rb") as file:
        asked = [ask(line, REQUESTS) for line in read_lines(file)]
    good = [one.row.custom_id for one in asked if not isinstance(one, BadRow)]
    bad = [one for one in asked if isinstance(one, BadRow)]
    assert good == ["ok1", "ok3"]
    assert [one.line for one in bad] == list(range(2, 18))
    assert all(one.code and one.message for one in bad)
    readable = {one.line: one.custom_id for one in bad if one.custom_id is not None}
    assert readable == {8: "nan", 9: "inf", 10: "dupkey", 11: "nobody", 12: "strbody", 14: "utf8"}


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"prompt": "a",}', "invalid_json"),
        (b'{"prompt": "a"', "invalid_json"),
        (b'{"prompt": "a"}{"prompt": "b"}', "invalid_json"),
        (b'{"prompt": "a", "x": -Infinity}', "invalid_json"),
        (b'{"prompt": "a", "x": -1e999}', "invalid_json"),
        (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"prompt": "a", "x": {"y": 1, "y": 1}}', "invalid_json"),
        (b'{"prompt": "a", "x": ' + b"[" * 101 + b"]" * 101 + b"}", "invalid_json"),
        (b'{"prompt": "a", "x": ' + b"[" * 100_000, "invalid_json"),
        (b'{"prompt": "\\ud83d"}', "invalid_json"),
        (b'{"\\udc00": 1, "prompt": "a"}', "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_utf8"),
        ('{"prompt": "a"}'.encode("utf-16"), "invalid_utf8"),
        (b"\0\0\0", "invalid_json"),
        (b"true", "invalid_row"),
        (b"[]", "invalid_row"),
        (b"{}", "invalid_request"),
        (b'{"prompt": null}', "invalid_request"),
        (b'{"prompt": 7}', "invalid_request"),
        (b'{"prompt": []}', "invalid_request"),
        (b'{"prompt": ["a", 5]}', "invalid_request"),
        (b'{"prompt": {"a": 1}}', "invalid_request"),
        (b'{"messages": []}', "invalid_request"),
        (b'{"messages": "hello"}', "invalid_request"),
        (b'{"messages": ["hello"]}', "invalid_request"),
        (b'{"messages": [{"role": "user"}]}', "invalid_request"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "invalid_request"),
        (b'{"prompt": "a", "temperature": "0"}', "invalid_request"),
        (b'{"prompt": "a", "max_tokens": 0}', "invalid_request"),
        (b'{"body": {"prompt": "a", "tools": []}}', "invalid_request"),
    ],
)
def test_a_bad_line_between_good_ones(raw: bytes, code: str) -> None:
    content = b'{"prompt": "before"}\n' + raw + b'\n{"prompt": "after"}'
    asked = [ask(line, REQUESTS) for line in read_lines(io.BytesIO(content))]
    codes = [one.code if isinstance(one, BadRow) else one.job.prompt for one in asked]
    assert codes[0] == "before"
    assert codes[1] == code
    assert codes[-1] == "after"
    json.dumps([one.message for one in asked if isinstance(one, BadRow)], allow_nan=False).encode()


def test_a_line_without_end_is_read_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONGEST_LINE", 100)
    long = b'{"prompt": "' + b"x" * 1000 + b'"}'
    rows = rows_of(long + b'\n{"prompt": "next"}\n' + long)
    assert [row.code if isinstance(row, BadRow) else row.columns for row in rows] == [
        "line_too_long",
        {"prompt": "next"},
        "line_too_long",
    ]
    assert [row.line for row in rows] == [1, 2, 3]


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything(content: bytes) -> None:
    for row in rows_of(content):
        assert isinstance(row, Row | BadRow)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans())
def test_columns_are_kept_as_they_are(columns: dict[str, object], ascii_only: bool) -> None:
    try:
        raw = json.dumps(columns, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    row = parse(Line(1, raw))
    if isinstance(row, Row):
        assert json.dumps(row.columns) == json.dumps(columns)
    else:
        assert row.code == "invalid_json"
        assert "surrogate" in row.message


TEXTS = st.sampled_from(
    [
        "a",
        "b:c",
        ":",
        "\\u003a",
        "\\u003A:",
        "\\u00e9",
        "\\ud83d\\ude00",
        "\\ud800",
        "é:",
        '\\":\\"',
        "\\\\u003a",
        "\1",
    ]
).map('"{}"'.format)
NUMBERS = st.sampled_from(
    ["0", "-0", "-0.0", "1e5", "1e999", "NaN", "-Infinity", "01", "9" * 30, "9" * 5000, "0.1"]
)


def _members(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Objects as text, with names that may stand there twice."""
    member = st.tuples(TEXTS, st.sampled_from([":", " : "]), inner).map("".join)
    return st.lists(member, max_size=4).map(", ".join).map("{{{}}}".format)


JSON = st.recursive(
    TEXTS | NUMBERS | st.sampled_from(["null", "true", "[]", "{}"]),
    lambda inner: st.lists(inner, max_size=3).map(", ".join).map("[{}]".format) | _members(inner),
    max_leaves=8,
)


@given(_members(JSON) | JSON | st.text(max_size=9))
def test_what_is_read_the_fast_way_is_what_the_strict_one_reads(text: str) -> None:
    line = Line(1, text.encode(errors="surrogatepass"))
    found = lines._clean_object(line)
    if found is not None:
        assert repr(lines._parse_object(line)) == repr(found)


def test_a_plain_line_is_read_the_fast_way() -> None:
    for text in ('{"prompt": "a: b", "x": [1, 2.5, {"y": null}]}', r'{"prompt": "caf\u00e9: \ud83d\ude00"}'):
        assert lines._clean_object(Line(1, text.encode())) == json.loads(text)


def test_row_parameters_beat_the_defaults_and_null_is_not_given() -> None:
    requests = Requests("run", {"max_tokens": 8, "temperature": 0.5}, "the-model")
    raw = b'{"prompt": [1, 2], "max_tokens": 3, "temperature": null, "seed": 7, "topic": "x"}'
    asked = ask(Line(4, raw), requests)
    assert not isinstance(asked, BadRow)
    job = asked.job
    assert (job.prompt, job.params.max_tokens, job.params.temperature, job.seed) == ([1, 2], 3, 0.5, 7)
    assert (job.run, job.model, job.stream) == ("run", "the-model", False)
    assert job.id.startswith("run.4.")


def test_seeds_come_from_the_row_and_not_from_the_run() -> None:
    def seed(run: str, number: int, raw: bytes) -> int:
        asked = ask(Line(number, raw), Requests(run, {}, None))
        assert not isinstance(asked, BadRow)
        return asked.job.seed

    same = b'{"prompt": "a"}'
    assert seed("one", 1, same) == seed("two", 1, same)
    assert len({seed("one", number, same) for number in range(1, 50)}) == 49
