"""Text of a growing output, sent only once it is final.

    tokens   10813   235   119  | 1564        SmolLM2: three tokens are one character, the fourth is " family"
    decode   "\\ufffd" "\\ufffd" "👩"   "👩 family"
    sent     ""      ""     "👩"   " family"

A token's text depends on its neighbours: bytes of one character lie in several tokens, and some decoders drop the
first space. What may still change is held back, and no more. The texts joined equal
`tokenizer.decode(all ids, skip_special_tokens=..., clean_up_tokenization_spaces=False)`.

    byte-level BPE    every token is some bytes: held back are those of an incomplete character
    any other         a short window of tokens is decoded: held back is a run of byte tokens (`<0xE2>`), as one stray
                      byte in it turns the whole run into U+FFFD, and a U+FFFD at the end, where it may be a part
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders

_WINDOW = 16
"""Tokens kept for context before the window is shortened."""
_REPLACEMENT = "\ufffd"
_SURROGATES = frozenset(bytes((0xED, second)) for second in range(0xA0, 0xC0))
"""First two bytes of what would be U+D800 to U+DFFF."""

Decode = Callable[[list[int]], str]


class TextStream(Protocol):
    """The text of one output: `push` a token, get the text that is now final; `flush` the rest at the end."""

    def push(self, token_id: int) -> str:
        """Text that is final now and was not before."""
        ...

    def flush(self) -> str:
        """What was held back, incomplete characters as U+FFFD. Nothing may be pushed after it."""
        ...


class Detokenizer:
    """What the streams of one tokenizer share."""

    def __init__(self, tokenizer: Any) -> None:
        """
        Args:
            tokenizer: a transformers tokenizer. A fast one's backend is called directly (4 us against 20).
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._decode = _decode_function(tokenizer, backend)
        self._bytes = _TokenBytes(backend) if backend is not None and _is_byte_level(backend) else None
        id_of = tokenizer.get_vocab().get if backend is None else backend.token_to_id
        self._byte_ids = _byte_ids(id_of, partial(self._decode, skip_special_tokens=False))
        self._texts: dict[int, str] = {}
        self._before = _id_with_text(tokenizer)
        self.special_ids = _special_ids(tokenizer, backend)
        """What `skip_special_tokens` leaves out."""

    def stream(self, token_ids: Iterable[int] = (), skip_special_tokens: bool = True) -> TextStream:
        """A new stream, as it stands after the text of these tokens has been sent."""
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        stream: TextStream
        if self._bytes is not None:
            stream = ByteLevelStream(self._bytes, hidden)
        else:
            decode = partial(self._decode, skip_special_tokens=skip_special_tokens)
            stream = WindowStream(decode, hidden, self._byte_ids)
        for token_id in token_ids:
            stream.push(token_id)
        return stream

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, with the space it brings; special tokens show, parts are U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            before = self._decode(self._before, skip_special_tokens=False)
            both = self._decode([*self._before, token_id], skip_special_tokens=False)
            alone = self._decode([token_id], skip_special_tokens=False)
            text = self._texts[token_id] = both[len(before) :] if both.startswith(before) else alone
        return text


class ByteLevelStream:
    """A stream over tokens that are bytes of UTF-8.

    Python's decoder and the tokenizer's both put one U+FFFD for each maximal part of an ill-formed sequence (Unicode
    3.9, U+FFFD substitution), so decoding bit by bit gives what decoding everything at once gives. But two bytes that
    begin a surrogate, which UTF-8 has not, Python holds back for a third; here they are two U+FFFD at once.
    """

    __slots__ = ("_bytes", "_hidden", "_part")

    def __init__(self, token_bytes: dict[int, bytes], hidden: frozenset[int]) -> None:
        self._bytes = token_bytes
        self._hidden = hidden
        self._part = b""
        """At most three bytes of an incomplete character."""

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        data = self._part + self._bytes[token_id]
        text, length = utf_8_decode(data, "replace")
        part = data[length:]
        if part in _SURROGATES:
            text, part = text + 2 * _REPLACEMENT, b""
        self._part = part
        return text

    def flush(self) -> str:
        return self._part.decode("utf-8", "replace")


class WindowStream:
    """A stream that decodes its last tokens again with each new one and cuts off what has been sent.

    The two-pointer scheme of Hugging Face's text-generation-inference, with one pointer in characters.
    """

    __slots__ = ("_boundary", "_byte_ids", "_decode", "_hidden", "_sent", "_window")

    def __init__(self, decode: Decode, hidden: frozenset[int], byte_ids: frozenset[int]) -> None:
        """
        Args:
            decode: the tokenizer's.
            hidden: ids that it leaves out; they are never in the window.
            byte_ids: ids that are one byte each; where there are any, no other token holds part of a character.
        """
        self._decode = decode
        self._hidden = hidden
        self._byte_ids = byte_ids
        self._window: list[int] = []
        self._sent = 0
        """Characters of the window's text that are sent."""
        self._boundary = 0
        """Tokens of the window that were there when text was last sent with nothing held back."""

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._window.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._decode(self._window)
        whole = bool(self._byte_ids) or not text.endswith(_REPLACEMENT)
        final = text if whole else text[:-1]
        new, self._sent = final[self._sent :], max(self._sent, len(final))
        if whole and new:
            if len(self._window) >= _WINDOW:
                self._drop(self._boundary)
            self._boundary = len(self._window)
        elif len(self._window) >= 2 * _WINDOW:
            self._drop_settled(text)
        return new

    def flush(self) -> str:
        return self._decode(self._window)[self._sent :] if self._window else ""

    def _drop(self, count: int) -> None:
        """Forget the window's first tokens; the rest has text, all of it sent, and begins with a character."""
        if count:
            del self._window[:count]
            self._sent = len(self._decode(self._window))

    def _drop_settled(self, text: str) -> None:
        """Shorten a window of U+FFFD after U+FFFD, which never ends whole, where it falls apart without a seam.

        An incomplete character has at most three bytes, so its tokens are among the last three.
        """
        for count in range(len(self._window) - 4, len(self._window) - 8, -1):
            head, tail = map(self._decode, (self._window[:count], self._window[count:]))
            if tail and head + tail == text:
                del self._window[:count]
                self._sent = max(0, self._sent - len(head))
                self._boundary = 0
                return


class NoText:
    """The detokenizer of an engine without a tokenizer, and the stream of each of its outputs."""

    special_ids: frozenset[int] = frozenset()

    def stream(self, _token_ids: Iterable[int] = (), skip_special_tokens: bool = True) -> TextStream:  # noqa: ARG002
        return self

    def token_text(self, _token_id: int) -> str:
        return ""

    def push(self, _token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token of a byte-level tokenizer, looked up once. Ids it does not have are none."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        try:
            data = bytes(map(_BYTES.__getitem__, token))
        except KeyError:  # an added token, written as it is
            data = token.encode()
        self[token_id] = data
        return data


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table).

    Printable bytes of Latin-1 stand for themselves, the others follow from U+0100 on in order.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(shown))
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()


def _is_byte_level(backend: Tokenizer) -> bool:
    return isinstance(backend.decoder, decoders.ByteLevel)


def _special_ids(tokenizer: Any, backend: Tokenizer | None) -> frozenset[int]:
    if backend is None:
        return frozenset(tokenizer.all_special_ids)
    added = backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _byte_ids(id_of: Callable[[str], int | None], decode: Decode) -> frozenset[int]:
    """Ids of `<0x00>` to `<0xFF>`, where the vocabulary has them and the decoder reads them as bytes."""
    ids = [found for byte in range(256) if (found := id_of(f"<0x{byte:02X}>")) is not None]
    if len(ids) < 256 or decode([ids[byte] for byte in "日".encode()]) != "日":
        return frozenset()
    return frozenset(ids)


def _id_with_text(tokenizer: Any) -> list[int]:
    """A token after which another shows the space it brings; none where the tokenizer does not write letters."""
    token_ids: list[int] = tokenizer.encode("a", add_special_tokens=False)
    return token_ids[-1:]


def _decode_function(tokenizer: Any, backend: Tokenizer | None) -> Callable[..., str]:
    if backend is not None:
        return backend.decode
    return partial(tokenizer.decode, clean_up_tokenization_spaces=False)
