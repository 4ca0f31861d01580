"""From a job's prompts to token ids."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from engine.chat import Chat, check_unicode, render
from engine.special_text import SpecialText
from engine.trial import Trial
from protocol import ErrorCode, Job, RequestError


class Prompts:
    """Renders chats and tokenizes; implements `engine.interface.PromptEncoder`.

    One lock: a tokenizer's truncation and padding state is shared, and two threads in it can meet "Already
    borrowed". A prompt of 100 tokens takes some 0.1 ms. Templates are rendered outside it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._special = SpecialText(tokenizer)
        self._templates = Trial("engine.template_trial")
        self._adds_bos = tokenizer.bos_token_id is not None and tokenizer.encode("")[:1] == [
            tokenizer.bos_token_id
        ]

    def encode(self, job: Job) -> list[list[int]]:
        """Token ids of each prompt of the job; a chat is one prompt. Any may be empty.

        Raises:
            RequestError: a text is not Unicode, the model has no chat template, its template refuses the
                messages, or its tokenizer cannot split special tokens.
        """
        if job.messages is not None:
            return [self._chat(job)]
        prompts: Sequence[str | list[int]] = job.prompts
        several = len(prompts) > 1
        return [
            self._text(prompt, job, f"prompt[{index}]" if several else "prompt")
            if isinstance(prompt, str)
            else list(prompt)
            for index, prompt in enumerate(prompts)
        ]

    def words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Token ids of every form in which the words can be written: as they stand, and after a space.

        Each form is read twice, as a text of its own and after a line break: tokenizers that put a space before
        a text (Llama 2) would hide how a word looks within one.

        Raises:
            RequestError: a word is not Unicode, or no token.
        """
        forms: dict[tuple[int, ...], None] = {}
        for index, word in enumerate(words):
            field = f"bad_words[{index}]"
            check_unicode(word, field)
            found = [ids for text in (word, f" {word}") for ids in self._readings(text)]
            if not self._plain(word):
                raise RequestError(
                    ErrorCode.INVALID_REQUEST, f"{field}: {word!r} is no token of this model's tokenizer"
                )
            forms.update(dict.fromkeys(found))
        return list(forms)

    def _readings(self, text: str) -> list[tuple[int, ...]]:
        before, within = self._plain("\n"), self._plain(f"\n{text}")
        readings = [tuple(self._plain(text))]
        if within[: len(before)] == before:
            readings.append(tuple(within[len(before) :]))
        return [ids for ids in readings if ids]

    def _plain(self, text: str) -> list[int]:
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _text(self, text: str, job: Job, field: str) -> list[int]:
        check_unicode(text, field)
        with self._lock:
            if job.split_special_tokens:
                self._special.check_text(text)
            ids: list[int] = self._tokenizer.encode(
                text,
                add_special_tokens=job.add_special_tokens,
                split_special_tokens=job.split_special_tokens,
            )
        # The tokenizer adds a BOS of its own; text that already begins with one must not get two.
        bos = self._tokenizer.bos_token_id
        doubled = self._adds_bos and job.add_special_tokens and ids[:2] == [bos, bos]
        return ids[1:] if doubled else ids

    def _chat(self, job: Job) -> list[int]:
        chat = Chat.of(job)
        chat, marks = self._special.hide(chat) if job.split_special_tokens else (chat, {})
        # The template writes the special tokens, BOS among them: the tokenizer adds none.
        rendered = render(self._tokenizer, job, chat, self._templates)
        if not marks:
            return self._plain(rendered)
        with self._lock:
            return self._special.encode(rendered, marks)
