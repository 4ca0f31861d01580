"""A row as a job: plain rows, and the lines of OpenAI's batch files.

plain    {"prompt": text or ids, "max_tokens": 64, ...other columns}      sampling parameters beside the prompt
         {"messages": [{role, content}, ...], "tools": [...], ...}        as well as what says how it is rendered
batch    {"custom_id": ..., "method": ..., "url": ..., "body": {...}}     the same fields inside `body`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from producer.bulk import openai
from producer.bulk.lines import Row
from producer.bulk.wording import Wording
from producer.request import RENDERING, build_job, over
from protocol import ErrorCode, Job, RequestError, SamplingParams
from protocol.job import CHAT_ONLY


class Requests:
    """Makes the jobs of one run."""

    def __init__(
        self,
        run: str,
        defaults: Mapping[str, Any],
        model: str | None,
        rendering: Mapping[str, Any] | None = None,
        wording: Wording = Wording(),
    ) -> None:
        """
        Args:
            run: the run's id; job ids begin with it.
            defaults: sampling parameters for rows that do not set them.
            model: refuse to be answered by a model of another name; None: whatever the queue serves.
            rendering: how the text of rows that do not say it becomes tokens; what is of chats, for chats.
            wording: how columns become a question.
        """
        self._run = run
        self._defaults = dict(defaults)
        self._model = model
        self._rendering = dict(rendering or {})
        self._wording = wording if wording != Wording() else None

    def job(self, row: Row) -> Job:
        """The job of a row.

        Raises:
            RequestError: the row cannot be asked; each field is named.
        """
        columns = row.columns if self._wording is None else self._wording.question(row.columns)
        fields, defaults = _read(columns)
        if row.kind == "typed":
            fields = {name: _without_nulls(value) for name, value in fields.items()}
        given = _set(fields, SamplingParams.model_fields.keys())
        if row.kind == "text":
            given = _values_of(given)
        sampling = over(over(defaults, self._defaults), given)
        sampling.setdefault("seed", _seed(row))
        is_chat = fields.get("messages") is not None
        rendering = {
            **{name: value for name, value in self._rendering.items() if is_chat or name not in CHAT_ONLY},
            **_set(fields, RENDERING),
        }
        return build_job(
            fields.get("prompt"),
            _without_null_members(fields.get("messages")),
            None,
            sampling,
            f"{self._run}.{row.line}.{row.digest}",
            run=self._run,
            model=self._model,
            stream=False,
            **rendering,
        )


def _read(columns: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Where a row keeps prompt and parameters, and the parameters that hold where it is silent."""
    if "prompt" in columns or "messages" in columns:
        return columns, {}
    if "body" not in columns:
        raise _invalid("there is neither prompt nor messages")
    openai.check_endpoint(columns)
    body = columns["body"]
    if not isinstance(body, dict):
        raise _invalid("body is no JSON object")
    if "prompt" not in body and "messages" not in body:
        raise _invalid("body has neither prompt nor messages")
    return openai.fields_of(body), openai.defaults_of(columns.get("url"), body)


def _set(fields: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of the names that have a value; null is none."""
    return {name: fields[name] for name in names if fields.get(name) is not None}


def _values_of(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters in a table of text: what a cell says in JSON, else its text; an empty one says nothing."""
    values = {}
    for name, cell in cells.items():
        if cell == "":
            continue
        try:
            value = json.loads(cell)
        except ValueError:
            value = cell
        values[name] = cell if name == "stop" and not isinstance(value, list) else value
    return values


def _without_nulls(value: Any) -> Any:
    """A value without the members that a table's schema has filled in; a turn's `content` may be null."""
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_nulls(below) for name, below in value.items() if below is not None or name == "content"
    }


def _without_null_members(turns: Any) -> Any:
    """Turns as a reply of OpenAI's API holds them, whose `refusal`, `audio` and `function_call` are null."""
    if not isinstance(turns, list):
        return turns
    return [
        {name: value for name, value in turn.items() if value is not None or name == "content"}
        if isinstance(turn, dict)
        else turn
        for turn in turns
    ]


def _seed(row: Row) -> int:
    """A seed from the row's place and content: the same file gives the same draws, equal prompts differ.

    48 bits, which every JSON reader keeps exact.
    """
    return int.from_bytes(hashlib.blake2b(f"{row.line} {row.digest}".encode(), digest_size=6).digest(), "big")


def _invalid(why: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, why)
