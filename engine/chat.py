"""From a job's chat to one text, by the template of the model or of the job.

Templates are programs. transformers runs them in the immutable sandbox of jinja2: no range is longer than 100,000,
nothing reaches Python. The model's own is trusted as the model is; one that came with a job may run for ever or fill
the memory, so it runs in a process of its own, and what it wrote has a bound.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from engine.trial import MEMORY_BYTES, Trial, TrialFailed
from protocol import ErrorCode, Job, Message, RequestError

TEMPLATE_SECONDS = 5.0
"""Most processor time for a template that came with a job; the models' own take less than a millisecond."""
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


def render(tokenizer: PreTrainedTokenizerBase, job: Job, chat: Chat, trial: Trial) -> str:
    """The text of a chat, the special tokens of the template among it.

    Args:
        trial: of `engine.template_trial`.

    Raises:
        RequestError: there is no template or no valid one, it refuses the messages, fails, takes too long, too much
            memory or writes too much; or the text is not Unicode; or the job's template could not be tried
            (`device_error`: that may pass).
    """
    if not (job.chat_template or tokenizer.chat_template):
        raise _refusal(
            "the model has no chat template: send prompt instead of messages, or chat_template with them"
        )
    opens_turn = job.add_generation_prompt
    if opens_turn is None:
        opens_turn = not job.continue_final_message
    asked = {
        "tools": chat.tools,
        "add_generation_prompt": opens_turn,
        "continue_final_message": job.continue_final_message,
        **chat.variables,
    }
    if job.chat_template:
        rendered = _by_jobs_template(tokenizer, job.chat_template, chat, asked, trial)
    else:
        rendered = _by_models_template(tokenizer, chat, asked)
    _check_rendered(rendered, chat)
    return rendered


def _by_models_template(tokenizer: PreTrainedTokenizerBase, chat: Chat, asked: dict[str, Any]) -> str:
    try:
        rendered: str = tokenizer.apply_chat_template(chat.messages, tokenize=False, **asked)
    except TemplateSyntaxError as error:
        raise _invalid("the model's chat template", error.lineno, error.message or "") from error
    except Exception as error:  # whatever a program can raise
        raise _refused_by(_message_of(error)) from error
    if len(rendered) > MAX_CHARACTERS:
        raise _too_long(len(rendered))
    return rendered


def _by_jobs_template(
    tokenizer: PreTrainedTokenizerBase, template: str, chat: Chat, asked: dict[str, Any], trial: Trial
) -> str:
    """As `apply_chat_template` does it, elsewhere. Where the model's templates have names, the job's may be one."""
    template = tokenizer.get_chat_template(template, chat.tools)
    asked = {"chat_template": template, **tokenizer.special_tokens_map, **asked}
    try:
        told = trial.ask([chat.messages, asked, MAX_CHARACTERS], TEMPLATE_SECONDS)
    except TrialFailed as error:
        raise RequestError(ErrorCode.DEVICE_ERROR, f"chat_template: {error}") from error
    match told:
        case {"text": str(text)}:
            return text
        case {"length": int(length)}:
            raise _too_long(length)
        case {"line": int(line), "fault": str(fault)}:
            raise _invalid("chat_template", line, fault)
        case {"fault": str(fault)}:
            raise _refused_by(fault)
    raise _refusal(
        f"the chat template ran for more than {TEMPLATE_SECONDS:g} s, or took more than {MEMORY_BYTES >> 30} GiB"
    )


def _invalid(whose: str, line: int, fault: str) -> RequestError:
    return _refusal(f"{whose} is no valid template: line {line}: {_quote(fault)}")


def _refused_by(fault: str) -> RequestError:
    return _refusal(f"the chat template refused the messages: {_quote(fault)}")


def _too_long(length: int) -> RequestError:
    return _refusal(f"the chat template wrote {length} characters, at most {MAX_CHARACTERS} are taken")


def _refusal(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, message)


def _message_of(error: Exception) -> str:
    return str(error) or type(error).__name__


def _quote(fault: str) -> str:
    text = " ".join(fault.split())
    return text if len(text) <= MAX_QUOTE else text[:MAX_QUOTE] + "..."


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
