"""What an output's text is, and what of it goes out when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.output_text import OutputText
from engine.text import NoText
from protocol import SamplingParams
from tests.engine import small_tokenizers
from tests.engine.doubles import case
from tests.engine.slow_search import SlowSearch
from tests.engine.small_tokenizers import byte_ids_of, byte_level, falls_back, llama
from tests.engine.test_text import detokenizer_of, outputs, whole

pytestmark = pytest.mark.model
CASES = ["A01", "A03", "A05", "A06", "A08", "A10", "A11", "A12"]
ROWS = [(name, index) for name in CASES for index in range(len(case(name)["rows"]))]


@dataclass
class Sent:
    """What an output sent, and how it ended."""

    parts: list[str] = field(default_factory=list)
    stopped: str | int | None = None
    finish_reason: str = "abort"

    @property
    def text(self) -> str:
        return "".join(self.parts)


def run(
    tokenizer: Any, token_ids: list[int], eos: int | None = None, written: int = 0, **params: Any
) -> Sent:
    """The output of these tokens, as an engine makes it; the first `written` were sent by an earlier attempt."""
    sampling = SamplingParams(**params)
    output = OutputText(detokenizer_of(tokenizer), sampling, token_ids[:written])
    sent = Sent()
    for count, token_id in enumerate(token_ids[written:], written + 1):
        if token_id == eos or token_id in sampling.stop_token_ids:
            sent.parts.append(output.end(token_id))
            sent.stopped, sent.finish_reason = (
                output.stopped or (None if token_id == eos else token_id),
                "stop",
            )
            return sent
        sent.parts.append(output.push(token_id))
        if output.stopped is not None:
            sent.stopped, sent.finish_reason = output.stopped, "stop"
            return sent
        if count == sampling.token_limit:
            sent.finish_reason = "length"
            break
    sent.parts.append(output.flush())
    sent.stopped = output.stopped
    return sent


@pytest.mark.parametrize(("name", "index"), ROWS)
def test_case(smollm2: Any, name: str, index: int) -> None:
    row = case(name)["rows"][index]
    expect = row["expect"]
    if "error" in expect:
        with pytest.raises(ValueError, match="stop"):
            SamplingParams(**row["params"])
        return
    sent = run(smollm2, row["script_ids"], eos=2, **row["params"])
    for count in range(len(sent.parts) + 1):
        assert expect["text"].startswith("".join(sent.parts[:count]))
    assert sent.text == expect["text"]
    assert sent.finish_reason == expect.get("finish_reason", "stop")
    assert sent.stopped == expect.get("stop_reason")
    num_tokens = len(sent.parts) - (sent.finish_reason == "length")
    assert num_tokens == expect.get("completion_tokens", num_tokens)
    if name == "A01":
        assert "\ufffd" not in sent.text


def test_a_family_goes_out_character_by_character(smollm2: Any) -> None:
    sent = run(smollm2, case("A01")["rows"][0]["script_ids"], eos=2)
    assert sent.parts[:5] == ["", "", "\U0001f469", "", "\u200d"]


def test_held_back_text_goes_out_as_soon_as_it_cannot_be_a_stop_string(smollm2: Any) -> None:
    token_ids = smollm2.encode(" one two three five", add_special_tokens=False)
    assert run(smollm2, token_ids, stop="two three four").parts == [" one", " ", "", "two three five", ""]


class TestEnd:
    """5 is <file_sep>, special; 582, 827, 1296: " one two three"."""

    @pytest.mark.parametrize(
        ("last", "params", "text"),
        [
            (1296, {}, " one two"),
            (1296, {"include_stop_str_in_output": True}, " one two three"),
            (5, {}, " one two"),
            (5, {"skip_special_tokens": False}, " one two"),
            (5, {"include_stop_str_in_output": True}, " one two"),
            (5, {"include_stop_str_in_output": True, "skip_special_tokens": False}, " one two<file_sep>"),
        ],
    )
    def test_the_ending_token_shows_only_where_asked(
        self, smollm2: Any, last: int, params: dict[str, bool], text: str
    ) -> None:
        for stop in ((), ("two th#",)):
            sent = run(smollm2, [582, 827, last], stop_token_ids=[last], stop=stop, **params)
            assert (sent.text, sent.stopped) == (text, last)

    def test_it_completes_no_stop_string_unless_it_is_shown(self, smollm2: Any) -> None:
        ids, stop = [582, 827, 1296], {"stop_token_ids": [1296], "stop": "two three"}
        assert run(smollm2, ids, **stop).stopped == 1296
        assert run(smollm2, ids, **stop).text == " one two"
        shown = run(smollm2, ids, include_stop_str_in_output=True, **stop)
        assert (shown.text, shown.stopped) == (" one two three", "two three")
        for include in (False, True):
            hidden = run(smollm2, [582, 2], eos=2, stop="<|im_end|>", include_stop_str_in_output=include)
            assert (hidden.text, hidden.stopped) == (" one", None)

    def test_half_a_character_before_it_is_flushed(self, smollm2: Any) -> None:
        assert run(smollm2, [582, 10813, 235, 2], eos=2).text == " one\ufffd"
        assert run(smollm2, [582, 10813, 235, 2], eos=2, stop="e\ufffd#").text == " one\ufffd"


def test_flushed_text_may_complete_a_stop_string(smollm2: Any) -> None:
    sent = run(smollm2, [582, 10813], stop="e\ufffd")
    assert (sent.text, sent.stopped) == (" on", "e\ufffd")
    sent = run(smollm2, [582, 10813, 2], eos=2, stop="e\ufffd", include_stop_str_in_output=True)
    assert (sent.text, sent.stopped) == (" one\ufffd", "e\ufffd")


class TestMinTokens:
    """ " one two three four", a token each word."""

    ids = (582, 827, 1296, 1876)

    @pytest.mark.parametrize(("min_tokens", "text"), [(0, " one "), (1, " one "), (2, " one two three four")])
    def test_a_stop_string_counts_from_the_token_after(
        self, smollm2: Any, min_tokens: int, text: str
    ) -> None:
        sent = run(smollm2, [*self.ids], stop="two", min_tokens=min_tokens)
        assert (sent.text, sent.stopped) == (text, None if min_tokens == 2 else "two")

    def test_one_completed_after_may_begin_before(self, smollm2: Any) -> None:
        sent = run(smollm2, [*self.ids], stop=["two three", "one"], min_tokens=2)
        assert (sent.parts, sent.stopped) == ([" one", " ", ""], "two three")

    def test_what_is_flushed_belongs_to_the_last_token(self, smollm2: Any) -> None:
        assert run(smollm2, [582, 10813], stop="\ufffd", min_tokens=2).stopped is None
        assert run(smollm2, [582, 10813], stop="\ufffd", min_tokens=1).stopped == "\ufffd"


class TestHidden:
    """Special tokens that are not shown. 26843, 665, 5, 19556: "Hi", " there", <file_sep>, "Hello"."""

    ids = (26843, 665, 5, 19556)

    @pytest.mark.parametrize("include", [False, True])
    @pytest.mark.parametrize(
        ("stop", "before", "shown"),
        [
            ("<file_sep>", "Hi there", ""),
            ("there<file", "Hi ", "there"),
            ("sep>He", "Hi there", "He"),
            ("there<file_sep>Hell", "Hi ", "thereHell"),
            ("thereHell", "Hi ", "thereHell"),
        ],
    )
    def test_they_count_by_their_text_and_what_is_shown_counts_without_it(
        self, smollm2: Any, stop: str, before: str, shown: str, include: bool
    ) -> None:
        sent = run(smollm2, [*self.ids], stop=stop, include_stop_str_in_output=include)
        assert (sent.text, sent.stopped) == (before + shown * include, stop)

    @pytest.mark.parametrize(
        ("stops", "stopped", "text"),
        [
            (["He", "sep>He"], "sep>He", "Hi there"),
            (["eHe", "sep>He"], "eHe", "Hi ther"),
            (["eHe", "re<file_sep>He"], "re<file_sep>He", "Hi the"),
        ],
    )
    def test_of_two_at_once_the_one_that_begins_first(
        self, smollm2: Any, stops: list[str], stopped: str, text: str
    ) -> None:
        sent = run(smollm2, [*self.ids], stop=stops)
        assert (sent.text, sent.stopped) == (text, stopped)

    def test_text_after_one_is_held_back_with_it_and_let_go_by_another(self, smollm2: Any) -> None:
        sent = run(smollm2, [26843, 5, 19556, 5, 582], stop="<file_sep>Hello!")
        assert sent.parts == ["Hi", "", "", "Hello", " one", ""]

    def test_shown_they_are_text(self, smollm2: Any) -> None:
        sent = run(
            smollm2, [*self.ids], stop="sep", skip_special_tokens=False, include_stop_str_in_output=True
        )
        assert (sent.text, sent.stopped) == ("Hi there<file_sep", "sep")


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = OutputText(NoText(), SamplingParams(stop="a"), [1, 2])
    assert (output.push(3), output.end(4), output.stopped) == ("", "", None)


def final_text(tokenizer: Any, token_ids: list[int], skip: bool) -> str:
    """Of the decoded text, what no token that follows can change."""
    byte_ids = byte_ids_of(tokenizer)
    special = detokenizer_of(tokenizer).special_ids if skip else frozenset()
    token_ids = [token_id for token_id in token_ids if token_id not in special]
    if falls_back(tokenizer):
        while token_ids and token_ids[-1] in byte_ids:
            token_ids.pop()
        return whole(tokenizer, token_ids, skip)
    text = whole(tokenizer, token_ids, skip)
    incomplete = text.endswith("\ufffd") and any(
        len(whole(tokenizer, [*token_ids, byte_ids[byte]], skip)) == len(text) for byte in (0x80, 0x90, 0xA0)
    )
    return text[:-1] if incomplete else text


def slow_run(tokenizer: Any, token_ids: list[int], params: SamplingParams) -> Sent:
    """Decodes everything after every token, and searches all of it."""
    skip, search = params.skip_special_tokens, SlowSearch(params.stop)
    hidden = detokenizer_of(tokenizer).special_ids if skip else frozenset()
    text, sent = "", Sent()

    def add(after: str, count: int, held: Callable[[], int]) -> None:
        nonlocal text
        found = search.add(after[len(text) :], counts=count > params.min_tokens)
        send(after, found, held)
        text = after

    def send(after: str, found: tuple[str, int, int] | None, held: Callable[[], int]) -> None:
        end = len(after) - held()
        if found is not None:
            sent.stopped, begin, end = found
            end = end if params.include_stop_str_in_output else begin
        sent.parts.append(after[len(sent.text) : end])

    for count, token_id in enumerate(token_ids, 1):
        if token_id in hidden:
            word = tokenizer.decode([token_id], skip_special_tokens=False)
            send(text, search.add(word, shown=False, counts=count > params.min_tokens), search.num_held)
        else:
            add(final_text(tokenizer, token_ids[:count], skip), count, search.num_held)
        if sent.stopped is not None:
            return sent
    add(whole(tokenizer, token_ids, skip), len(token_ids), lambda: 0)
    return sent


@st.composite
def outputs_with_stops(draw: st.DrawFn, tokenizer: Any) -> tuple[list[int], dict[str, Any], int]:
    """Tokens, parameters whose stop strings are mostly parts of the text or begin in it, and a place to cut."""
    token_ids = draw(outputs(tokenizer, max_size=12))
    texts = [whole(tokenizer, token_ids, skip) or "-" for skip in (True, False)]
    stops = []
    for _ in range(draw(st.integers(1, 3))):
        text = draw(st.sampled_from(texts))
        begin = draw(st.integers(0, len(text) - 1))
        part = text[begin : begin + draw(st.integers(1, 6))]
        stops.append(part + draw(st.sampled_from(["", "", "", "#", "a"])))
    params = {
        "stop": stops,
        "min_tokens": draw(st.sampled_from([0, 0, 1, 4])),
        "skip_special_tokens": draw(st.booleans()),
        "include_stop_str_in_output": draw(st.booleans()),
    }
    return token_ids, params, draw(st.integers(0, len(token_ids)))


@pytest.mark.parametrize("kind", ["smollm2", "byte_level", "llama", "gemma"])
@pytest.mark.parametrize("examples", [30, pytest.param(1000, marks=pytest.mark.long)])
def test_the_same_as_decoding_everything_after_every_token(
    request: pytest.FixtureRequest, kind: str, examples: int
) -> None:
    """The same parts: no more is held back than must be. And resumed anywhere, the parts that follow are the same."""
    tokenizer = request.getfixturevalue(kind) if kind == "smollm2" else getattr(small_tokenizers, kind)()

    @settings(max_examples=examples, deadline=None)
    @given(drawn=outputs_with_stops(tokenizer))
    def holds(drawn: tuple[list[int], dict[str, Any], int]) -> None:
        token_ids, params, cut = drawn
        slow, sent = (
            slow_run(tokenizer, token_ids, SamplingParams(**params)),
            run(tokenizer, token_ids, **params),
        )
        assert (sent.parts, sent.stopped) == (slow.parts, slow.stopped)
        if cut < len(sent.parts):
            resumed = run(tokenizer, token_ids, written=cut, **params)
            assert (resumed.parts, resumed.stopped) == (sent.parts[cut:], sent.stopped)

    holds()


@pytest.mark.parametrize("make", [byte_level, llama])
def test_a_character_over_a_hidden_token_stands_after_it(make: Callable[[], Any]) -> None:
    tokenizer = make()
    first, *rest = [byte_ids_of(tokenizer)[byte] for byte in "日".encode()]
    (word,) = tokenizer.encode("a", add_special_tokens=False)
    end = tokenizer.eos_token
    ids = [word, first, tokenizer.eos_token_id, *rest, word]
    assert run(tokenizer, ids, stop=f"a{end}日").stopped == f"a{end}日"
    assert run(tokenizer, ids, stop="a日").text == ""
