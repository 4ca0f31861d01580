"""Streamed text is final, and joined it is what the tokenizer makes of all tokens at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import chain, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import Detokenizer, NoText, TextStream, WindowStream
from tests.engine import small_tokenizers
from tests.engine.small_tokenizers import byte_ids_of, byte_level, gemma, llama, slow

pytestmark = pytest.mark.model
KINDS = ["smollm2", "byte_level", "llama", "gemma", "metaspace", "slow"]


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2")
    make: Callable[[], Any] = getattr(small_tokenizers, request.param)
    return make()


def whole(tokenizer: Any, token_ids: list[int], skip: bool = True) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    return text


def streamed(stream: TextStream, token_ids: list[int]) -> list[str]:
    return [*(stream.push(token_id) for token_id in token_ids), stream.flush()]


@cache
def detokenizer_of(tokenizer: Any) -> Detokenizer:
    return Detokenizer(tokenizer)


def check(tokenizer: Any, token_ids: list[int], cut: int, skip: bool = True) -> None:
    """Joined equals whole, whatever was sent was final, and a stream resumed at `cut` goes on without a seam."""
    detokenizer = detokenizer_of(tokenizer)
    parts = streamed(detokenizer.stream(skip_special_tokens=skip), token_ids)
    assert "".join(parts) == whole(tokenizer, token_ids, skip)
    rest = streamed(detokenizer.stream(token_ids[:cut], skip_special_tokens=skip), token_ids[cut:])
    assert rest == parts[cut:]


def outputs(tokenizer: Any, max_size: int = 60) -> st.SearchStrategy[list[int]]:
    """Random ids: of the whole vocabulary, of what is odd in it, and the bytes of whole characters."""
    size = len(tokenizer)
    special = sorted(detokenizer_of(tokenizer).special_ids)
    byte_ids = byte_ids_of(tokenizer)
    any_id, odd = st.integers(0, size - 1), st.integers(max(0, size - 24), size - 1)
    few_bytes = st.sampled_from([byte_ids[byte] for byte in b"\xf0\x9f\x91\xa9\xe6\xa5\x80\xef\xbf\xbd #a"])
    one = st.one_of(any_id, odd, few_bytes, st.sampled_from(special)).map(lambda token_id: [token_id])
    character = st.text(max_size=2).map(lambda text: [byte_ids[byte] for byte in text.encode()])
    return st.lists(st.one_of(one, one, character), max_size=max_size).map(lambda parts: [*chain(*parts)])


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("examples", [25, pytest.param(1500, marks=pytest.mark.long)])
def test_joined_equals_whole(tokenizer: Any, examples: int, skip: bool) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(token_ids=outputs(tokenizer), where=st.floats(0, 1))
    def holds(token_ids: list[int], where: float) -> None:
        check(tokenizer, token_ids, int(where * len(token_ids)), skip)

    holds()


@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives(smollm2: Any, text: str) -> None:
    token_ids = smollm2.encode(text, add_special_tokens=False)
    check(smollm2, token_ids, len(token_ids) // 2)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=12))
def test_bytes_are_sent_with_the_last_of_their_character(text: str) -> None:
    """No later, U+FFFD itself among them."""
    stream = detokenizer_of(byte_level()).stream()
    for character in text:
        data = character.encode()
        assert [stream.push(byte) for byte in data] == [""] * (len(data) - 1) + [character]


def test_bytes_are_held_back_only_while_they_may_become_a_character() -> None:
    """Any two that might begin one, and three that begin a surrogate, of which Python's decoder holds two back."""
    tokenizer = byte_level()
    ids = byte_ids_of(tokenizer)
    every_character = (chr(code).encode() for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    parts = {text[:length] for text in every_character for length in range(1, len(text))}
    cases = [bytes(pair) for pair in product(range(0xC0, 0x100), range(0x100))]
    for data in (*cases, b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xed\x9f\xbf"):
        stream, sent = detokenizer_of(tokenizer).stream(), ""
        for count in range(1, len(data) + 1):
            sent += stream.push(ids[data[count - 1]])
            held = next((n for n in (3, 2, 1) if n <= count and data[count - n : count] in parts), 0)
            assert sent == data[: count - held].decode(errors="replace"), data[:count]


def test_a_token_may_hold_the_tail_of_one_character_and_the_head_of_the_next() -> None:
    joint = 256  # the last byte of 日 and the first of 本
    token_ids = [*"日".encode()[:2], joint, *"本".encode()[1:], *"本".encode()[:1]]
    assert streamed(detokenizer_of(byte_level()).stream(), token_ids) == [
        "",
        "",
        "日",
        "",
        "本",
        "",
        "\ufffd",
    ]


@pytest.mark.parametrize("make", [llama, gemma])
def test_a_stray_byte_spoils_its_run_only_before_it_is_sent(make: Callable[[], Any]) -> None:
    good, stray = [3 + byte for byte in "日".encode()], [3 + 0xFF]
    word = make().convert_tokens_to_ids("a")
    assert streamed(Detokenizer(make()).stream(), [word, *good, word]) == ["a", "", "", "", "日a", ""]
    spoiled = streamed(Detokenizer(make()).stream(), [word, *good, *stray, word])
    assert spoiled == ["a", "", "", "", "", "\ufffd" * 4 + "a", ""]


@pytest.mark.parametrize("make", [llama, gemma])
def test_beside_byte_tokens_a_replacement_character_is_whole(make: Callable[[], Any]) -> None:
    real = make().convert_tokens_to_ids("\ufffd")
    assert streamed(Detokenizer(make()).stream(), [real] * 40) == ["\ufffd"] * 40 + [""]


def test_hidden_special_tokens_leave_no_trace_and_shown_ones_their_text(tokenizer: Any) -> None:
    end, (word,) = tokenizer.eos_token_id, tokenizer.encode("a", add_special_tokens=False)
    detokenizer, token_ids = detokenizer_of(tokenizer), [end, word, end, word]
    assert streamed(detokenizer.stream(), token_ids) == ["", "a", "", "a", ""]
    shown = streamed(detokenizer.stream(skip_special_tokens=False), token_ids)
    assert shown == [tokenizer.eos_token, "a", tokenizer.eos_token, "a", ""]


def test_many_special_tokens_do_not_cost_the_space_after_them() -> None:
    word, end, the = (llama().convert_tokens_to_ids(piece) for piece in ("a", "</s>", "▁the"))
    check(llama(), [word, *[end] * 50, the], 30)


def test_the_text_of_a_token_by_itself(smollm2: Any) -> None:
    small = Detokenizer(smollm2)
    assert [small.token_text(token_id) for token_id in (1564, 10813, 2)] == [
        " family",
        "\ufffd",
        "<|im_end|>",
    ]
    for make in (llama, gemma):
        pieces = ["▁the", "<0xE6>", "</s>", "日"]
        texts = [
            Detokenizer(make()).token_text(token_id) for token_id in make().convert_tokens_to_ids(pieces)
        ]
        assert texts == [" the", "\ufffd", "</s>", "日"]


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert streamed(NoText().stream([1, 2], skip_special_tokens=False), [3, 4]) == ["", "", ""]
    assert NoText().token_text(5) == ""


@pytest.mark.parametrize("kind", ["words", "replacement characters", "bytes that are no character"])
def test_the_window_stays_small(kind: str) -> None:
    """Cost per token does not grow with the output: what is decoded again is a few tokens, whatever they are."""
    tokens = {
        "words": slow().encode("the quick brown fox", add_special_tokens=False),
        "replacement characters": slow().encode("\ufffd", add_special_tokens=False),
        "bytes that are no character": [0xF0],
    }[kind]
    lengths = []

    def decode(token_ids: list[int]) -> str:
        lengths.append(len(token_ids))
        return whole(slow(), token_ids)

    stream = WindowStream(decode, frozenset(), frozenset())
    token_ids = tokens * (2000 // len(tokens))
    assert "".join(streamed(stream, token_ids)) == whole(slow(), token_ids)
    assert max(lengths) <= 40
    assert sum(lengths) <= 2000 * 60
