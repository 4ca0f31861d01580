"""From a job's chat to one text, by the template of the model or of the job.

Templates are programs. transformers runs them in the immutable sandbox of jinja2: no range is longer than 100,000,
nothing reaches Python. A template that came with a job may still run for ever, so it has a deadline, and what it
wrote has a bound. Not covered: a single operation that makes something huge (`'x' * 10 ** 10`) is over before anyone
can look; it costs the worker its memory, and a job that does so is convicted as any that crashes a worker.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from protocol import ErrorCode, Job, Message, RequestError

TEMPLATE_SECONDS = 5.0
"""Most time for a template that came with a job; the models' own take less than a millisecond."""
MAX_CHARACTERS = 1 << 24
"""Most text from a template: some four million tokens, beyond any context."""
MAX_QUOTE = 500
"""Most characters quoted of what a template says: transformers puts the whole chat into some messages."""


@dataclass(frozen=True)
class Chat:
    """What the user wrote, as the template gets it: plain dictionaries, lists, strings and numbers."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]

    @classmethod
    def of(cls, job: Job) -> Chat:
        """The chat of a job that has one."""
        messages = [_turn(message) for message in job.messages or ()]
        return cls(messages, job.tools or None, job.chat_template_kwargs or {})


def _turn(message: Message) -> dict[str, Any]:
    """One turn with the fields that are set; templates ask whether the others are defined.

    Content is always a text. A turn of tool calls alone has an empty one: templates that add strings would fail on
    None or write the word.
    """
    turn: dict[str, Any] = {"role": message.role, "content": message.text}
    for field in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, field)) is not None:
            turn[field] = value
    if message.tool_calls is not None:
        turn["tool_calls"] = [_with_parsed_arguments(call) for call in message.tool_calls]
    return turn


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are a dictionary, where they are the JSON of one.

    OpenAI sends arguments as a JSON string; templates expect a dictionary (transformers' convention, and vLLM
    does the same). Anything else is handed on as it came.
    """
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def render(tokenizer: PreTrainedTokenizerBase, job: Job, chat: Chat) -> str:
    """The text of a chat, the special tokens of the template among it.

    Raises:
        RequestError: there is no template or no valid one, it refuses the messages, fails, takes too long or writes
            too much; or the text is not Unicode.
    """
    if not (job.chat_template or tokenizer.chat_template):
        raise _refusal(
            "the model has no chat template: send prompt instead of messages, or chat_template with them"
        )
    opens_turn = job.add_generation_prompt
    if opens_turn is None:
        opens_turn = not job.continue_final_message

    def apply() -> Any:
        return tokenizer.apply_chat_template(
            chat.messages,
            tools=chat.tools,
            chat_template=job.chat_template,
            add_generation_prompt=opens_turn,
            continue_final_message=job.continue_final_message,
            tokenize=False,
            **chat.variables,
        )

    try:
        rendered: str = _in_time(apply) if job.chat_template else apply()
    except _OutOfTime:
        raise _refusal(f"the chat template ran for more than {TEMPLATE_SECONDS:g} s") from None
    except TemplateSyntaxError as error:
        whose = "chat_template" if job.chat_template else "the model's chat template"
        raise _refusal(
            f"{whose} is no valid template: line {error.lineno}: {_quote(error.message or '')}"
        ) from error
    except Exception as error:  # whatever a program can raise
        raise _refusal(f"the chat template refused the messages: {_quote(error)}") from error
    if len(rendered) > MAX_CHARACTERS:
        raise _refusal(
            f"the chat template wrote {len(rendered)} characters, at most {MAX_CHARACTERS} are taken"
        )
    _check_rendered(rendered, chat)
    return rendered


def _refusal(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, message)


def _quote(error: Exception | str) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_QUOTE else text[:MAX_QUOTE] + "..."


class _OutOfTime(BaseException):
    """Not an Exception: jinja2's filters swallow some of those."""


def _in_time(apply: Callable[[], Any]) -> Any:
    """Call `apply`, for so long.

    A thread cannot be stopped from outside. Python tells a trace function of every line that the thread runs, and
    what that function raises ends the code that it looks at: loops, macros and filters of a template alike.
    """
    end = time.monotonic() + TEMPLATE_SECONDS

    def trace(_frame: FrameType, _event: str, _argument: Any) -> Any:
        if time.monotonic() > end:
            raise _OutOfTime
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return apply()
    finally:
        sys.settrace(before)


def check_unicode(text: str, field: str) -> None:
    """Refuse half of a surrogate pair: no tokenizer can read it.

    Raises:
        RequestError: naming the field and the character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refusal(
            f"{field}: half of a surrogate pair at character {error.start}; it is no Unicode text"
        ) from None


def _check_rendered(rendered: str, chat: Chat) -> None:
    """Look for the field that is at fault only where the text is: arguments may bring one from escapes in JSON."""
    if rendered.isascii():
        return
    try:
        check_unicode(rendered, "the rendered chat")
    except RequestError:
        for part, value in (
            ("messages", chat.messages),
            ("tools", chat.tools),
            ("chat_template_kwargs", chat.variables),
        ):
            _check_strings(value, part)
        raise


def _check_strings(value: Any, path: str) -> None:
    if isinstance(value, str):
        check_unicode(value, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_unicode(key, f"{path}: a key")
            _check_strings(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_strings(item, f"{path}.{index}")
