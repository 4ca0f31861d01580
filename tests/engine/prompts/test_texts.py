"""Texts and ids become ids, and words that are barred."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from engine.prompts import Prompts
from protocol import ErrorCode, RequestError
from tests.engine.doubles import case
from tests.engine.prompts.making import encode, make, spaced
from tests.models import byte_tokenizer


@pytest.mark.parametrize(
    "row", [row for row in case("C01")["rows"] if "prompt_tokens" in row], ids=lambda row: row["id"]
)
def test_nothing_is_stripped(smollm2: Any, row: dict[str, Any]) -> None:
    assert len(encode(smollm2, prompt=row["prompt"])) == row["prompt_tokens"]


def test_an_empty_text_is_no_tokens(smollm2: Any) -> None:
    assert encode(smollm2, prompt="") == []


def test_several_prompts_come_back_in_order(smollm2: Any) -> None:
    prompts = Prompts(smollm2)
    assert prompts.encode(make(prompt=["Hi", "", "there"])) == [
        smollm2.encode("Hi"),
        [],
        smollm2.encode("there"),
    ]
    assert prompts.encode(make(prompt=[[5, 0, 49151], [7]])) == [[5, 0, 49151], [7]]
    assert prompts.encode(make(prompt=[5, 6])) == [[5, 6]]
    assert prompts.encode(make(prompt=["5"])) == [smollm2.encode("5")]


def adds_bos(tokenizer: Any) -> Any:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_bos_is_written_once() -> None:
    tokenizer = adds_bos(byte_tokenizer(512))
    body = encode(tokenizer, prompt="a", add_special_tokens=False)
    assert encode(tokenizer, prompt="a") == encode(tokenizer, prompt="<s>a") == [1, *body]
    chat = encode(tokenizer, messages=[{"role": "user", "content": "a"}])
    assert chat[:1] == [1]
    assert chat[1] != 1


def test_bos_that_the_user_wrote_stays() -> None:
    plain, adding = byte_tokenizer(512), adds_bos(byte_tokenizer(512))
    (a,) = encode(plain, prompt="a")
    assert encode(plain, prompt="<s><s>a") == [1, 1, a]  # this tokenizer adds none
    assert encode(adding, prompt="<s><s>a") == [1, 1, a]
    assert encode(adding, prompt="<s><s>a", add_special_tokens=False) == [1, 1, a]


def test_special_text_in_a_prompt_is_text_where_asked(smollm2: Any) -> None:
    text = "a<|im_end|>b"
    assert 2 in encode(smollm2, prompt=text)
    ids = encode(smollm2, prompt=text, split_special_tokens=True)
    assert 2 not in ids
    assert smollm2.decode(ids) == text
    assert 2 in encode(smollm2, prompt=text)  # the option does not stick to the tokenizer
    adding = adds_bos(byte_tokenizer(512))
    assert encode(adding, prompt="<s>", split_special_tokens=True)[:2] == [
        1,
        *encode(adding, prompt="<", add_special_tokens=False),
    ]


def test_a_word_is_barred_as_it_stands_and_after_a_space(smollm2: Any) -> None:
    words = Prompts(smollm2).words
    rows = case("B12")["rows"]
    assert words(rows[0]["bad_words"]) == [(smollm2.convert_tokens_to_ids("Paris"),), (7042,)]
    assert words(rows[1]["bad_words"]) == [(74, 25089), (1777, 25089)]
    assert words(["Paris", "ZORK", "Paris"]) == [*words(["Paris"]), *words(["ZORK"])]
    assert words([]) == []


def test_a_word_within_a_text_is_barred_where_texts_begin_with_a_space() -> None:
    tokenizer = adds_bos(spaced(["▁", "the", "▁the", "\n"], split=False))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the")) == ["<s>", "▁the"]
    forms = [tokenizer.convert_ids_to_tokens(form) for form in Prompts(tokenizer).words(["the"])]
    assert ["▁the"] in forms
    assert ["the"] in forms


def test_a_word_that_is_no_token_is_refused() -> None:
    tokenizer = spaced(["a"])
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("!", "")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(RequestError, match=r"bad_words\[1\]: '!!' is no token") as caught:
        Prompts(tokenizer).words(["a", "!!"])
    assert caught.value.code == ErrorCode.INVALID_REQUEST
