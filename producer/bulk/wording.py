"""How columns become a question, where rows do not hold it as `prompt` or `messages`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict

from producer.refusal import Refused
from protocol import ErrorCode, RequestError

LONGEST_PROMPT = 4 << 20
"""Characters a template may write; a longer prompt would be refused as a job."""


class Wording(BaseModel):
    """What the command says of the columns; kept in the manifest."""

    model_config = ConfigDict(frozen=True)

    prompt_column: str | None = None
    """Holds the prompt, or a chat."""
    prompt_template: str | None = None
    """Jinja2, with the columns as variables; `row` is all of them."""
    system: str | None = None
    """System message; the prompt is then the user's turn of a chat."""
    chat: bool = False
    """The prompt is the user's turn of a chat."""

    def check(self) -> None:
        """See that it can be used at all.

        Raises:
            Refused: it contradicts itself, or the template is none.
        """
        if self.prompt_column is not None and self.prompt_template is not None:
            raise Refused(
                "--prompt-column and --prompt-template both say what the prompt is: give one of them"
            )
        _ = self._template

    def question(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """The columns, with `prompt` or `messages` made as the command says.

        Raises:
            RequestError: the row lacks what it is made of.
        """
        prompt, messages = self._prompt(columns)
        if prompt is None and messages is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, _nothing_asked(columns))
        if not (self.chat or self.system is not None):
            return {**columns, "prompt": prompt, "messages": messages}
        if prompt is not None:
            messages = [{"role": "user", "content": prompt}]
        if self.system is not None and isinstance(messages, list) and not _has_system(messages):
            messages = [{"role": "system", "content": self.system}, *messages]
        return {**columns, "prompt": None, "messages": messages}

    def _prompt(self, columns: Mapping[str, Any]) -> tuple[Any, Any]:
        """The prompt, or the chat."""
        if self.prompt_template is not None:
            return self._render(columns), None
        if self.prompt_column is None:
            return columns.get("prompt"), columns.get("messages")
        if self.prompt_column not in columns:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"there is no column {self.prompt_column!r}")
        value = columns[self.prompt_column]
        if value is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"the column {self.prompt_column!r} is null here")
        is_chat = isinstance(value, list) and any(isinstance(turn, dict) for turn in value)
        return (None, value) if is_chat else (value, None)

    @cached_property
    def _template(self) -> Any:
        """The compiled template: sandboxed, and a variable that is not there is a fault."""
        if self.prompt_template is None:
            return None
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        )
        try:
            return environment.from_string(self.prompt_template)
        except jinja2.TemplateSyntaxError as fault:
            raise Refused(f"--prompt-template: line {fault.lineno}: {fault.message}") from None

    def _render(self, columns: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        try:
            for piece in self._template.generate({**columns, "row": columns}):
                pieces.append(piece)
                size += len(piece)
                if size > LONGEST_PROMPT:
                    raise RequestError(
                        ErrorCode.INVALID_REQUEST,
                        f"the template writes more than {LONGEST_PROMPT:,} characters",
                    )
        except RequestError:
            raise
        except Exception as fault:  # whatever a user's template does with a row's values
            raise RequestError(ErrorCode.INVALID_REQUEST, f"the template: {fault}") from None
        return "".join(pieces)


def _nothing_asked(columns: Mapping[str, Any]) -> str:
    if isinstance(columns.get("body"), dict):
        return (
            "--system and --chat do not change the body of a batch file's row: write messages into the body"
        )
    return "there is neither prompt nor messages: --prompt-column names another column that holds it"


def _has_system(messages: list[Any]) -> bool:
    return any(isinstance(turn, dict) and turn.get("role") == "system" for turn in messages[:1])


def named_columns(wording: Wording, id_column: str | None) -> dict[str, str | None]:
    """The flags that name a column, and what they name."""
    return {"--prompt-column": wording.prompt_column, "--id-column": id_column}
