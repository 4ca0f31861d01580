"""Output and errors as OpenAI's Batch API writes them: for each row a line with the reply of its endpoint.

    {"id": "batch_req_...", "custom_id": "a",
     "response": {"status_code": 200, "request_id": "req_...", "body": {...}}, "error": null}

https://platform.openai.com/docs/api-reference/batch/request-output, .../chat/object and .../completions/object name
the fields. A row that was refused has the status and body that the endpoint would answer; one that was asked and has
no answer has `response` null. `error` is there for both, so that one look tells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import msgspec

from producer.bulk.lines import RowFault, file_and_line
from producer.bulk.manifest import Manifest
from producer.bulk.openai import CHATS, ENDPOINTS
from producer.bulk.records import Record
from producer.bulk.wording import Wording
from protocol import ErrorCode

_STATUS: Mapping[str, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.KV_CAPACITY_EXCEEDED: 400,
    ErrorCode.MODEL_NOT_FOUND: 404,
    **dict.fromkeys(map(str, RowFault), 400),
}
"""What an endpoint answers to a request that is at fault itself, by our code; every other failure is ours."""
_PART_OF_A_CHARACTER = "\ufffd"


class OpenAILines:
    """Writes the lines of one run; the same rows give the same lines, however often the run was interrupted."""

    def __init__(self, manifest: Manifest) -> None:
        self._created = manifest.created
        self._model = manifest.served or manifest.model or ""
        self._wording = manifest.wording
        self._id_column = manifest.id_column

    def line(self, record: Record) -> bytes:
        """A row's line, without its end."""
        row: dict[str, Any] = msgspec.json.decode(record.payload)
        name = hashlib.blake2b(f"{record.line} {record.digest}".encode(), digest_size=12).hexdigest()
        error = None if record.answered else _error(row)
        if error is None:
            response = _response(200, name, self._body(row, name))
        elif status := _STATUS.get(error["code"]):
            refusal = {"message": error["message"], "type": "invalid_request_error", "param": None}
            response = _response(status, name, {"error": {**refusal, "code": error["code"]}})
        else:
            response = None
        line = {
            "id": f"batch_req_{name}",
            "custom_id": self._custom_id(row, record),
            "response": response,
            "error": error,
        }
        return msgspec.json.encode(line)

    def _custom_id(self, row: Mapping[str, Any], record: Record) -> str | None:
        """The row's own name as text, or where it stands; None for a line that could not be read as a row."""
        own = row.get(self._id_column) if self._id_column else row.get("custom_id", row.get("id"))
        if own is not None and own != "":
            return own if isinstance(own, str) else msgspec.json.encode(own).decode()
        readable = record.answered or row.keys() - {"file", "line", "custom_id", "error"}
        return f"line-{file_and_line(record.line)[1]}" if readable else None

    def _body(self, row: Mapping[str, Any], name: str) -> dict[str, Any]:
        """The reply of the endpoint that the row asked."""
        chat = is_chat(row, self._wording)
        choices = row.get("completions") or [_only_choice(row)]
        return {
            "id": f"chatcmpl-{name}" if chat else f"cmpl-{name}",
            "object": "chat.completion" if chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [_chat_choice(choice) if chat else _text_choice(choice) for choice in choices],
            "usage": _usage(row),
            "system_fingerprint": None,
            "seed": row.get("seed"),
        }


def is_chat(row: Mapping[str, Any], wording: Wording) -> bool:
    """Whether a row asked for a chat's next turn, rather than for a text's continuation."""
    if wording != Wording():
        row = wording.question(row)
    if row.get("prompt") is not None or row.get("messages") is not None:
        return row.get("messages") is not None
    url = row.get("url")
    if isinstance(url, str) and url.rstrip("/").endswith(ENDPOINTS):
        return url.rstrip("/").endswith(CHATS)
    body = row.get("body")
    return isinstance(body, dict) and body.get("messages") is not None


def _response(status: int, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{name}", "body": body}


def _error(row: Mapping[str, Any]) -> dict[str, Any]:
    """Why, as the Batch API tells it, and where the row stands."""
    place = {name: row[name] for name in ("file", "line") if name in row}
    return {**row["error"], **place}


def _only_choice(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "index": 0,
        "text": row["completion"],
        **{name: row[name] for name in ("finish_reason", "stop_reason") if name in row},
    }


def _chat_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    logprobs = choice.get("logprobs")
    return {
        "index": choice["index"],
        "message": {"role": "assistant", "content": choice["text"], "refusal": None},
        "logprobs": None
        if logprobs is None
        else {"content": list(map(_chat_logprob, logprobs)), "refusal": None},
        **_end(choice),
    }


def _text_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    logprobs = choice.get("logprobs")
    return {
        "index": choice["index"],
        "text": choice["text"],
        "logprobs": None if logprobs is None else _text_logprobs(logprobs),
        **_end(choice),
    }


def _end(choice: Mapping[str, Any]) -> dict[str, Any]:
    """What both kinds of choices end with; what OpenAI does not have only where it says something."""
    ours = {name: choice[name] for name in ("stop_reason", "prompt_logprobs") if name in choice}
    return {"finish_reason": choice.get("finish_reason"), **ours}


def _chat_logprob(told: Mapping[str, Any]) -> dict[str, Any]:
    return {**_likely(told), "top_logprobs": list(map(_likely, told["top_logprobs"]))}


def _likely(told: Mapping[str, Any]) -> dict[str, Any]:
    token: str = told["token"]
    return {
        "token": token,
        "logprob": told["logprob"],
        "bytes": None if _PART_OF_A_CHARACTER in token else list(token.encode()),
    }


def _text_logprobs(logprobs: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The lists of the older endpoint; offsets are characters from the beginning of the choice's text."""
    tokens = [told["token"] for told in logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [told["logprob"] for told in logprobs],
        "top_logprobs": [
            {likely["token"]: likely["logprob"] for likely in [*told["top_logprobs"], told]}
            for told in logprobs
        ],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else [],
    }


def _usage(row: Mapping[str, Any]) -> dict[str, int] | None:
    """Tokens read and written; None where the row does not tell, as one of another program's output."""
    read, written = row.get("prompt_tokens"), row.get("completion_tokens")
    if read is None or written is None:
        return None
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
