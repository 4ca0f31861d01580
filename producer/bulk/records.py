"""What a run writes for a row: its columns with the completion, or an entry of the error file. Strict JSON, UTF-8."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from producer.bulk.lines import BadRow, Row
from protocol import Result

ANSWER_COLUMNS = ("completion", "finish_reason", "prompt_tokens", "completion_tokens", "seed")
"""Added to a row; columns of the same names are replaced."""
ERROR_COLUMNS = ("line", "custom_id", "error")


@dataclass(frozen=True, slots=True)
class Record:
    """A row's outcome, ready to be written."""

    line: int
    digest: str
    answered: bool
    payload: bytes
    """One JSON object, without a line end."""


def of_result(row: Row, result: Result) -> Record:
    """The outcome of a job that ended."""
    if result.state != "succeeded" or not result.choices:
        error = result.error
        code = error.code if error else result.state
        message = error.message if error else f"the job ended as {result.state}"
        return of_bad_row(BadRow(row.line, row.digest, row.custom_id, code, message, row.columns))
    usage = result.usage
    answer: dict[str, Any] = {
        "completion": result.text,
        "finish_reason": result.choices[0].finish_reason,
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "completion_tokens": usage.completion_tokens if usage else None,
        "seed": result.seed,
    }
    return Record(row.line, row.digest, True, _encode({**row.columns, **answer}))


def of_bad_row(bad: BadRow) -> Record:
    """The entry for a row that has no answer."""
    entry = {
        "line": bad.line,
        "custom_id": bad.custom_id,
        "error": {"code": bad.code, "message": bad.message},
    }
    columns = {name: value for name, value in bad.columns.items() if name not in ERROR_COLUMNS}
    return Record(bad.line, bad.digest, False, _encode({**entry, **columns}))


def _encode(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
