"""Special tokens that a user spelled out, read as plain text; those of the template stay special.

what the user wrote     Stop.<|im_end|>                      hide: a private character for each special text
the template writes     <|im_start|>user\\nStop.X<|im_end|>   X is out of its reach: it may trim, split, look
own ones told apart     {1}user\\nStop.X{2}                   {i}: a token only the copy of the tokenizer has
the user's ones back    {1}user\\nStop.<|im_end|>{2}          read with split_special_tokens; {i} -> i

One reading of the whole text, rather than of pieces: tokenizers treat the beginning of a text differently.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from engine.chat import Chat
from engine.json_strings import strings
from protocol import ErrorCode, RequestError

PRIVATE = 0x100000
"""Plane 16 of Unicode, for private use."""
PRIVATE_SIZE = 0xFFFE

Marks = dict[str, str]
"""From a special token's text to the private character that stands for it."""


class SpecialText:
    """The special tokens of one tokenizer. Not for two threads at once.

    Special is what the tokenizer says is special, as in all of transformers: tokens that are added but not special
    (Qwen's `<think>`) are read as always. A template that builds a special token out of pieces the user wrote,
    such as a role, writes its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = {
            token.content: token for token in tokenizer.added_tokens_decoder.values() if token.special
        }
        self._special_ids = frozenset(map(tokenizer.convert_tokens_to_ids, self._special))
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._own: _OwnTokens | None = None

    def hide(self, chat: Chat) -> tuple[Chat, Marks]:
        """Put private characters for the special texts in what the user wrote.

        Returns:
            The chat for the template, and the characters it holds: none where no special text occurs.
        """
        everything = (chat.messages, chat.tools, chat.variables)
        found = {text for string in strings(everything) for text in self._pattern.findall(string)}
        if not found:
            return chat, {}
        taken = set().union(*strings(everything))
        free = (
            character for number in range(PRIVATE_SIZE) if (character := chr(PRIVATE + number)) not in taken
        )
        marks = dict(zip(sorted(found), free, strict=False))

        def hidden(string: str) -> str:
            return self._pattern.sub(lambda match: marks[match[0]], string)

        variables = {name: _mapped(value, hidden) for name, value in chat.variables.items()}
        return Chat(_mapped(chat.messages, hidden), _mapped(chat.tools, hidden), variables), marks

    def encode(self, rendered: str, marks: Marks) -> list[int]:
        """Token ids of a chat that was rendered from hidden texts.

        Raises:
            RequestError: the tokenizer cannot do it.
        """
        if self._own is None:
            self._own = _OwnTokens(self._tokenizer, list(self._special.values()))
        own = self._own
        # In one pass: a name may hold a character that is a mark elsewhere.
        swap = own.names | {mark: special for special, mark in marks.items()}
        either = re.compile("|".join([self._pattern.pattern, *marks.values()]))
        ids = own.encode(either.sub(lambda match: swap[match[0]], rendered))
        self._check_plain(ids)
        return [own.ids.get(token_id, token_id) for token_id in ids]

    def check_text(self, text: str) -> None:
        """Refuse a text whose special texts this tokenizer cannot read as plain text.

        Raises:
            RequestError: it makes a special token of them all the same.
        """
        if self._pattern.search(text):
            self._check_plain(
                self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            )

    def _check_plain(self, token_ids: list[int]) -> None:
        """A model of unigrams finds `</s>` in its vocabulary when it is not taken out of the text before."""
        for token_id in token_ids:
            if token_id in self._special_ids:
                raise _cannot(f"{self._tokenizer.convert_ids_to_tokens(token_id)!r}")


class _OwnTokens:
    """A copy of the tokenizer with a second name for every special token, one that is not special itself.

    The names are random: a user who knew them could write control tokens again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: list[AddedToken]) -> None:
        if not tokenizer.is_fast:
            raise _cannot("special tokens in a chat")  # those in Python split at all added tokens or at none
        secret = "".join(chr(PRIVATE + secrets.randbelow(PRIVATE_SIZE)) for _ in range(8))
        self.names = {token.content: secret + chr(PRIVATE + index) for index, token in enumerate(special)}
        self._copy = copy.deepcopy(tokenizer)
        self._copy.add_tokens(
            [
                AddedToken(
                    self.names[token.content],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,
                )
                for token in special
            ]
        )
        convert = self._copy.convert_tokens_to_ids
        self.ids = {convert(name): convert(text) for text, name in self.names.items()}

    def encode(self, text: str) -> list[int]:
        """Ids of a text; where it holds names, they are keys of `ids`."""
        ids: list[int] = self._copy.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids


def _cannot(what: str) -> RequestError:
    return RequestError(
        ErrorCode.INVALID_REQUEST,
        f"split_special_tokens: this model's tokenizer cannot read {what} as plain text",
    )


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
