"""Small tokenizers, one of each kind of decoder, with specials, stray bytes and U+FFFD in their vocabularies."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

PARTS = ["日本".encode()[2:4], "é👩".encode()[1:3], "\ufffd".encode(), b" the", b"ab", b"\n\n", "日".encode()]
"""Tokens of more than a byte: the tail of one character with the head of the next, U+FFFD, words."""


@cache
def byte_level() -> Any:
    """As GPT-2 has it, with ids 0 to 255 for the bytes; special tokens hold a space and characters of the table."""
    table = bytes_to_unicode()
    pieces = [table[byte] for byte in range(256)] + ["".join(table[byte] for byte in part) for part in PARTS]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|a b|>", "<｜é▁Ġ｜>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("日 Ġ", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def _metaspace_vocabulary() -> dict[str, int]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "a", "b", "é", "日", "\ufffd", ".", "▁\ufffd", "\n"]
    return {piece: index for index, piece in enumerate(pieces)}


def _fast(decoder: Any) -> Any:
    tokenizer = Tokenizer(models.BPE(_metaspace_vocabulary(), [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@cache
def llama() -> Any:
    """As Llama 2 has it: `▁` for a space, the first one dropped, bytes for what the vocabulary lacks."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _fast(decoders.Sequence(steps))


@cache
def gemma() -> Any:
    """As Gemma has it: the first space stays."""
    return _fast(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


@cache
def metaspace() -> Any:
    """A metaspace decoder; it drops the spaces of the first token and reads no bytes."""
    return _fast(decoders.Metaspace())


class _Slow(PreTrainedTokenizer):
    """A tokenizer in Python over bytes, as tiktoken ones are: ids 0 to 255 for the bytes."""

    pieces = [bytes([byte]) for byte in range(256)] + PARTS

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def get_vocab(self) -> dict[str, int]:
        pieces = {piece.decode("latin-1"): index for index, piece in enumerate(self.pieces)}
        return {**pieces, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text.encode().decode("latin-1"))

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab()[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self.pieces[index].decode("latin-1")

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return b"".join(token.encode("latin-1") for token in tokens).decode("utf-8", "replace")


@cache
def slow() -> Any:
    return _Slow(eos_token="<|end|>")


@cache
def falls_back(tokenizer: Any) -> bool:
    """Whether its vocabulary has a token for each byte, by name."""
    return "<0xFF>" in tokenizer.get_vocab()


@cache
def byte_ids_of(tokenizer: Any) -> list[int]:
    """Ids of the 256 bytes (SmolLM2 lacks those that no text has: some other id stands there)."""
    vocabulary = tokenizer.get_vocab()
    if falls_back(tokenizer):
        return [vocabulary[f"<0x{byte:02X}>"] for byte in range(256)]
    table = bytes_to_unicode()
    return [vocabulary.get(table[byte], byte) for byte in range(256)]
