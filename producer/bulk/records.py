"""What a run writes for a row: its columns with the completion, or an entry of the error file. Strict JSON, UTF-8."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from producer.bulk.lines import BadRow, Row
from protocol import Result, TerminalState

ANSWER_COLUMNS = (
    "completion",
    "finish_reason",
    "stop_reason",
    "prompt_tokens",
    "completion_tokens",
    "seed",
    "completions",
)
"""Added to a row; columns of the same names are replaced. `completion` and its reasons are those of the first choice;
`stop_reason` is there where it says something, `completions` where one choice's text is not all."""
_ANSWERED = frozenset(ANSWER_COLUMNS)
_json = msgspec.json.encode


class Record(msgspec.Struct, frozen=True, gc=False):
    """A row's outcome, ready to be written."""

    line: int
    """Its position."""
    digest: str
    answered: bool
    payload: bytes
    """One JSON object, without a line end."""


class _Choice(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    index: int = 0
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[Any] | None = None
    prompt_logprobs: list[Any] | None = None


class _Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int
    completion_tokens: int


class _Error(msgspec.Struct, frozen=True, gc=False):
    code: str
    message: str


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What a run reads of a `Result`, in a quarter of the time."""

    state: TerminalState
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None
    model: str | None = None
    seed: int | None = None

    @classmethod
    def decode(cls, raw: bytes) -> Outcome:
        """Read a stored result.

        Raises:
            msgspec.ValidationError: it is no result.
        """
        return _OUTCOMES.decode(raw)


_OUTCOMES = msgspec.json.Decoder(Outcome)


def of_result(row: Row, result: Result | Outcome) -> Record:
    """The outcome of a job that ended."""
    if result.state != "succeeded" or not result.choices:
        error = result.error
        code = error.code if error else result.state
        message = error.message if error else f"the job ended as {result.state}"
        return of_bad_row(row.bad(code, message))
    usage = result.usage
    first = result.choices[0]
    answer: dict[str, Any] = {"completion": first.text, "finish_reason": first.finish_reason}
    if first.stop_reason is not None:
        answer["stop_reason"] = first.stop_reason
    answer |= {
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "completion_tokens": usage.completion_tokens if usage else None,
        "seed": result.seed,
    }
    if len(result.choices) > 1 or first.logprobs is not None or first.prompt_logprobs is not None:
        answer["completions"] = [
            {
                name: value
                for name in _Choice.__struct_fields__
                if (value := getattr(choice, name)) is not None
            }
            for choice in result.choices
        ]
    return Record(row.line, row.digest, True, _with_answer(row, answer))


def _with_answer(row: Row, answer: dict[str, Any]) -> bytes:
    """The columns as they stand in the line, down to the last digit, and the answer after them."""
    if _ANSWERED.isdisjoint(row.columns):
        return row.raw[:-1] + (b", " if row.columns else b"") + _json(answer)[1:]
    columns = {
        name: value
        for name, value in row.columns.items()
        if name in answer or name not in ("stop_reason", "completions")  # an earlier answer's
    }
    return _encode({**columns, **answer})


def is_cut(record: Record) -> bool:
    """Whether a choice of an answered row ended by its limit of tokens."""
    if b'"length"' not in record.payload:  # most rows need not be read
        return False
    row = json.loads(record.payload)
    choices = row.get("completions")
    reasons = [choice.get("finish_reason") for choice in choices or () if isinstance(choice, dict)]
    return "length" in [row.get("finish_reason"), *reasons]


def error_code(record: Record) -> str:
    """Why a row has no answer."""
    code: str = json.loads(record.payload)["error"]["code"]
    return code


def of_bad_row(bad: BadRow) -> Record:
    """The entry for a row that has no answer."""
    entry = {
        **({"file": bad.file} if bad.file is not None else {}),
        "line": bad.line,
        "custom_id": bad.custom_id,
        "error": {"code": bad.code, "message": bad.message},
    }
    columns = {name: value for name, value in bad.columns.items() if name not in entry}
    return Record(bad.number, bad.digest, False, _encode({**entry, **columns}))


def _encode(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
