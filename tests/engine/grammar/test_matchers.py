"""A matcher along its tokens: what may come next, what is refused, where it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bench.grammar import Walker
from engine.grammar import Grammars
from protocol import RequestError
from tests.engine.grammar.asking import (
    EOS,
    VOCAB_SIZE,
    allowed,
    asked,
    compiled,
    schema_asked,
)
from tests.models import smollm2_gguf


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


def test_a_refused_token_says_why(grammars: Grammars) -> None:
    matcher = compiled(grammars, asked("regex", regex="ab")).matcher()
    with pytest.raises(RequestError, match=r"does not allow token 3 here: \w") as raised:
        matcher.push(3)
    assert "\n" not in raised.value.message
