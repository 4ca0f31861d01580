"""A row as a job: plain rows, and the lines of OpenAI's batch files.

plain    {"prompt": text or ids, "max_tokens": 64, ...other columns}      sampling parameters beside the prompt
         {"messages": [{role, content}, ...], "tools": [...], ...}        as well as what says how it is rendered
batch    {"custom_id": ..., "method": ..., "url": ..., "body": {...}}     the same fields inside `body`
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from producer.bulk import openai
from producer.bulk.lines import Row
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
    ) -> None:
        """
        Args:
            run: the run's id; job ids begin with it.
            defaults: sampling parameters for rows that do not set them.
            model: refuse to be answered by a model of another name; None: whatever the queue serves.
            rendering: how the text of rows that do not say it becomes tokens; what is of chats, for chats.
        """
        self._run = run
        self._defaults = dict(defaults)
        self._model = model
        self._rendering = dict(rendering or {})

    def job(self, row: Row) -> Job:
        """The job of a row.

        Raises:
            RequestError: the row cannot be asked; each field is named.
        """
        fields, defaults = _read(row.columns)
        sampling = over(over(defaults, self._defaults), _set(fields, SamplingParams.model_fields.keys()))
        sampling.setdefault("seed", _seed(row))
        is_chat = fields.get("messages") is not None
        rendering = {
            **{name: value for name, value in self._rendering.items() if is_chat or name not in CHAT_ONLY},
            **_set(fields, RENDERING),
        }
        return build_job(
            fields.get("prompt"),
            fields.get("messages"),
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


def _seed(row: Row) -> int:
    """A seed from the row's place and content: the same file gives the same draws, equal prompts differ.

    48 bits, which every JSON reader keeps exact.
    """
    return int.from_bytes(hashlib.blake2b(f"{row.line} {row.digest}".encode(), digest_size=6).digest(), "big")


def _invalid(why: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, why)
