"""Streamed text is final, and joined it is what the tokenizer makes of all tokens at once."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import Detokenizer, TextStream

pytestmark = pytest.mark.model


@pytest.fixture(params=["smollm2", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def whole(tokenizer: Any, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def streamed(stream: TextStream, token_ids: list[int]) -> list[str]:
    return [*(stream.push(token_id) for token_id in token_ids), stream.flush()]


@cache
def detokenizer_of(tokenizer: Any) -> Detokenizer:
    return Detokenizer(tokenizer)


def check(tokenizer: Any, token_ids: list[int], cut: int) -> None:
    """Joined equals whole, whatever was sent was final, and a stream resumed at `cut` goes on without a seam."""
    detokenizer = detokenizer_of(tokenizer)
    parts = streamed(detokenizer.stream(), token_ids)
    assert "".join(parts) == whole(tokenizer, token_ids)
    rest = streamed(detokenizer.stream(token_ids[:cut]), token_ids[cut:])
    assert rest == parts[cut:]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_joined_equals_whole_for_byte_level_tokens(smollm2: Any, data: st.DataObject) -> None:
    bytes_and_all = st.one_of(
        st.integers(17, 272), st.integers(0, len(smollm2) - 1), st.sampled_from([10813, 232])
    )
    token_ids = data.draw(st.lists(bytes_and_all, max_size=80))
    check(smollm2, token_ids, data.draw(st.integers(0, len(token_ids))))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_joined_equals_whole_for_byte_fallback(byte_fallback: Any, data: st.DataObject) -> None:
    word = st.integers(259, len(byte_fallback) - 1)
    any_token = st.one_of(word, word, st.integers(0, len(byte_fallback) - 1))
    character = st.text(max_size=2).map(lambda text: [3 + byte for byte in text.encode()])
    pieces = data.draw(
        st.lists(st.one_of(any_token.map(lambda token_id: [token_id]), character), max_size=60)
    )
    token_ids = [token_id for piece in pieces for token_id in piece]
    check(byte_fallback, token_ids, data.draw(st.integers(0, len(token_ids))))


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives(smollm2: Any, text: str) -> None:
    token_ids = smollm2.encode(text, add_special_tokens=False)
    check(smollm2, token_ids, len(token_ids) // 2)


def test_a_stray_byte_spoils_its_run_only_before_it_is_sent(byte_fallback: Any) -> None:
    good, stray = [3 + byte for byte in "日".encode()], [3 + 0xFF]
    word = byte_fallback.convert_tokens_to_ids("a")
    assert streamed(Detokenizer(byte_fallback).stream(), [word, *good, word]) == ["a", "", "", "", "日a", ""]
    spoiled = streamed(Detokenizer(byte_fallback).stream(), [word, *good, *stray, word])
    assert spoiled == ["a", "", "", "", "", "\ufffd" * 4 + "a", ""]


def test_special_tokens_leave_no_trace(tokenizer: Any) -> None:
    end, word = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a")
    assert streamed(Detokenizer(tokenizer).stream(), [end, word, end, word]) == ["", "a", "", "a", ""]


def test_many_special_tokens_do_not_cost_the_space_after_them(byte_fallback: Any) -> None:
    word, end, the = (byte_fallback.convert_tokens_to_ids(piece) for piece in ("a", "</s>", "▁the"))
    check(byte_fallback, [word, *[end] * 50, the], 30)


def test_real_replacement_characters_are_sent_one_behind(smollm2: Any) -> None:
    real = smollm2.encode("\ufffd", add_special_tokens=False)
    parts = streamed(Detokenizer(smollm2).stream(), real * 100)
    assert "".join(parts) == "\ufffd" * 100
    assert "".join(parts[: 50 * len(real)]) == "\ufffd" * 49


@pytest.mark.parametrize("kind", ["words", "replacement characters", "bytes that are no character"])
def test_the_window_stays_small(smollm2: Any, kind: str) -> None:
    """Cost per token does not grow with the output: what is decoded again is a few tokens, whatever they are."""
    tokens = {
        "words": smollm2.encode("the quick brown fox jumps over", add_special_tokens=False),
        "replacement characters": smollm2.encode("\ufffd", add_special_tokens=False),
        "bytes that are no character": [10813],
    }[kind]
    detokenizer = Detokenizer(smollm2)
    lengths = []
    decode = detokenizer.decode
    detokenizer.decode = lambda token_ids: (lengths.append(len(token_ids)), decode(token_ids))[1]
    stream = detokenizer.stream()
    for token_id in tokens * (2000 // len(tokens)):
        stream.push(token_id)
    assert max(lengths) <= 40
    assert sum(lengths) <= 2000 * 60
