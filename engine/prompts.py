"""From a job's prompt to token ids."""

from __future__ import annotations

import threading

from transformers import PreTrainedTokenizerBase

from protocol import ErrorCode, Job, Message, RequestError


class Prompts:
    """Renders chats and tokenizes; implements `engine.interface.PromptEncoder`.

    One lock: a tokenizer's truncation and padding state is shared, and two threads in it can meet "Already
    borrowed". A prompt of 100 tokens takes some 0.1 ms.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def encode(self, job: Job) -> list[int]:
        """Token ids of the job's prompt; may be empty.

        Raises:
            RequestError: the text is not Unicode, the model has no chat template, or its template refuses
            the messages.
        """
        if job.messages is not None:
            return self._chat(job.messages)
        if isinstance(job.prompt, str):
            return self._text(job.prompt)
        return list(job.prompt or ())

    def _text(self, text: str) -> list[int]:
        _check_unicode(text, "prompt")
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text)
        bos = self._tokenizer.bos_token_id
        # The tokenizer adds a BOS of its own; text that already begins with one must not get two.
        doubled = bos is not None and ids[:2] == [bos, bos]
        return ids[1:] if doubled else ids

    def _chat(self, messages: list[Message]) -> list[int]:
        for index, message in enumerate(messages):
            _check_unicode(message.role, f"messages.{index}.role")
            _check_unicode(message.content, f"messages.{index}.content")
        if not self._tokenizer.chat_template:
            raise RequestError(
                ErrorCode.INVALID_REQUEST, "the model has no chat template: send prompt instead of messages"
            )
        chat = [{"role": message.role, "content": message.content} for message in messages]
        with self._lock:
            try:
                # transformers renders in jinja2's immutable sandbox.
                rendered = self._tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, tokenize=False
                )
            except (
                Exception
            ) as error:  # a template is a program that came with the model: it may raise anything
                raise RequestError(
                    ErrorCode.INVALID_REQUEST, f"the chat template refused the messages: {error}"
                ) from error
            # The template has written the special tokens already.
            ids: list[int] = self._tokenizer.encode(rendered, add_special_tokens=False)
        return ids


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"{field}: half of a surrogate pair at character {error.start}; it is no Unicode text",
        ) from error
