"""The flags for how a prompt or a chat becomes tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from producer.cli.flags import Flag, json_in, json_of, text_in


def _tools(path: Path) -> list[Any]:
    tools = json_in("--tools", path)
    if not isinstance(tools, list):
        raise typer.BadParameter(f"--tools {path}: it does not hold a list of tools")
    return tools


def _template(path: Path) -> str:
    return text_in("--chat-template", path)


def _variables(text: str) -> Any:
    value = json_of("--chat-template-kwargs", text)
    if not isinstance(value, dict):
        raise typer.BadParameter('--chat-template-kwargs: give an object, such as {"enable_thinking": false}')
    return value


FLAGS = (
    "Prompt",
    (
        Flag(
            "tools", "--tools", Path, "FILE", "Functions for a chat, as JSON in OpenAI's shape.", read=_tools
        ),
        Flag(
            "chat_template",
            "--chat-template",
            Path,
            "FILE",
            "A Jinja template for chats instead of the model's own.",
            read=_template,
        ),
        Flag(
            "chat_template_kwargs",
            "--chat-template-kwargs",
            str,
            "JSON|@FILE",
            'More variables for the template: {"enable_thinking": false}.',
            read=_variables,
        ),
        Flag("continue_final_message", "--continue", bool, None, "Go on with the last message of a chat."),
        Flag(
            "split_special_tokens",
            "--split-special-tokens",
            bool,
            None,
            "Read special tokens in the text (scraped <|im_end|>) as plain text.",
        ),
    ),
)
