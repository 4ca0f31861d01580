"""A row as a job: plain rows, and the lines of OpenAI's batch files.

plain    {"prompt": text or ids, "max_tokens": 64, ...other columns}      sampling parameters beside the prompt
         {"messages": [{role, content}, ...], ...}
batch    {"custom_id": ..., "method": ..., "url": ..., "body": {...}}     the same fields inside `body`
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from producer.bulk.lines import Row
from producer.request import build_job
from protocol import ErrorCode, Job, RequestError, SamplingParams

SAMPLING = frozenset(SamplingParams.model_fields)
BODY = SAMPLING | {"model", "prompt", "messages"}
"""What is read of a batch line's body. `model` is not compared with the one that answers."""


class Requests:
    """Makes the jobs of one run."""

    def __init__(self, run: str, defaults: Mapping[str, Any], model: str | None) -> None:
        """
        Args:
            run: the run's id; job ids begin with it.
            defaults: sampling parameters for rows that do not set them.
            model: refuse to be answered by a model of another name; None: whatever the queue serves.
        """
        self._run = run
        self._defaults = dict(defaults)
        self._model = model

    def job(self, row: Row) -> Job:
        """The job of a row.

        Raises:
            RequestError: the row cannot be asked; each field is named.
        """
        fields = _fields(row.columns)
        sampling = {
            **self._defaults,
            **{name: fields[name] for name in SAMPLING if fields.get(name) is not None},
        }
        sampling.setdefault("seed", _seed(row))
        return build_job(
            _checked(fields, "prompt", str | list, "text or a list of token ids"),
            _checked(fields, "messages", list, "a list of messages"),
            None,
            sampling,
            f"{self._run}.{row.line}.{row.digest}",
            run=self._run,
            model=self._model,
            stream=False,
        )


def _fields(columns: dict[str, Any]) -> dict[str, Any]:
    """Where a row keeps prompt and parameters."""
    if "prompt" in columns or "messages" in columns:
        return columns
    if "body" not in columns:
        raise _invalid("there is neither prompt nor messages")
    body = columns["body"]
    if not isinstance(body, dict):
        raise _invalid("body is no JSON object")
    if "prompt" not in body and "messages" not in body:
        raise _invalid("body has neither prompt nor messages")
    if unknown := sorted(name for name in body.keys() - BODY if body[name] is not None):
        raise _invalid(f"not supported: {', '.join(f'body.{name}' for name in unknown)}")
    return body


def _checked(fields: dict[str, Any], name: str, kind: Any, what: str) -> Any:
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise _invalid(f"{name} must be {what}")
    return value


def _seed(row: Row) -> int:
    """A seed from the row's place and content: the same file gives the same draws, equal prompts differ.

    48 bits, which every JSON reader keeps exact.
    """
    return int.from_bytes(hashlib.blake2b(f"{row.line} {row.digest}".encode(), digest_size=6).digest(), "big")


def _invalid(why: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, why)
