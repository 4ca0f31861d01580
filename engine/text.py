"""Text of a growing output, sent only once it is final.

    tokens   10813   235   119  | 1564        SmolLM2: three tokens are one character, the fourth is " family"
    decode   "\\ufffd" "\\ufffd" "👩"   "👩 family"
    sent     ""      ""     "👩"   " family"

A token's text depends on its neighbours: bytes of one character lie in several tokens, and some decoders drop the
first space. So a short window of tokens is decoded and what has been sent of it is cut off (the two-pointer scheme of
Hugging Face's text-generation-inference, with one pointer in characters). What may still change is held back:

    byte-level BPE    an incomplete character at the end, which decodes to one U+FFFD
    byte fallback     a run of byte tokens: one stray byte in it turns the whole run into U+FFFD

The texts joined equal `decode(all ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_WINDOW = 16
"""Tokens kept for context before the window is shortened."""
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """What the streams of one tokenizer share."""

    def __init__(self, tokenizer: Any) -> None:
        """
        Args:
            tokenizer: a transformers tokenizer. A fast one's backend is called directly (4 us against 20).
        """
        self.special_ids = _special_ids(tokenizer)
        self.byte_ids = _byte_ids(tokenizer)
        self.decode = _decode_function(tokenizer)

    def stream(self, token_ids: Iterable[int] = ()) -> TextStream:
        """A new stream, as it stands after the text of these tokens has been sent."""
        stream = TextStream(self)
        for token_id in token_ids:
            stream.push(token_id)
        return stream


class TextStream:
    """The text of one output: `push` a token, get the text that is now final; `flush` the rest at the end."""

    __slots__ = ("_boundary", "_detokenizer", "_sent", "_window")

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._window: list[int] = []
        self._sent = 0
        """Characters of the window's text that are sent."""
        self._boundary = 0
        """Tokens of the window that were there when text was last sent with nothing held back."""

    def push(self, token_id: int) -> str:
        if token_id in self._detokenizer.special_ids:
            return ""
        self._window.append(token_id)
        if token_id in self._detokenizer.byte_ids:
            return ""
        text = self._detokenizer.decode(self._window)
        whole = not text.endswith(_REPLACEMENT)
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
        """What was held back, incomplete characters as U+FFFD. Nothing may be pushed after it."""
        return self._detokenizer.decode(self._window)[self._sent :] if self._window else ""

    def _drop(self, count: int) -> None:
        """Forget the window's first tokens; the rest has text, all of it sent, and begins with a character."""
        if count:
            del self._window[:count]
            self._sent = len(self._detokenizer.decode(self._window))

    def _drop_settled(self, text: str) -> None:
        """Shorten a window of U+FFFD after U+FFFD, which never ends whole, where it falls apart without a seam.

        An incomplete character has at most three bytes, so its tokens are among the last three.
        """
        for count in range(len(self._window) - 4, len(self._window) - 8, -1):
            head, tail = map(self._detokenizer.decode, (self._window[:count], self._window[count:]))
            if tail and head + tail == text:
                del self._window[:count]
                self._sent = max(0, self._sent - len(head))
                self._boundary = 0
                return


class NoText:
    """The stream of an engine without a tokenizer."""

    def __init__(self, _token_ids: Iterable[int] = ()) -> None:
        pass

    def push(self, _token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token_id for token_id, token in added.items() if token.special}
    return frozenset(special.union(tokenizer.all_special_ids))


def _byte_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of `<0x00>` to `<0xFF>`, where the vocabulary has them."""
    vocabulary = tokenizer.get_vocab()
    names = (f"<0x{byte:02X}>" for byte in range(256))
    return frozenset(vocabulary[name] for name in names if name in vocabulary)


def _decode_function(tokenizer: Any) -> Callable[[list[int]], str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda token_ids: str(backend.decode(token_ids, skip_special_tokens=True))
    return lambda token_ids: str(
        tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )
