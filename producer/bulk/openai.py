"""The body of a line of OpenAI's batch files: what of it is read, what changes nothing, what is refused by name.

https://platform.openai.com/docs/api-reference/chat/create and .../completions/create name the fields; our own
sampling parameters may stand beside them, as with vLLM's server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from producer.request import RENDERING
from protocol import RequestError, SamplingParams
from protocol.validation import shortened

CHATS, COMPLETIONS = ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_FAULTS = 8
"""Most fields of one body that are named."""
READ = frozenset(SamplingParams.model_fields) | RENDERING | {"prompt", "messages", "model"}
IDLE = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
"""They say nothing of the answer's text, whatever they hold."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "verbosity": ("medium",),
}
"""Another value would change the answer: these alone pass."""
COMPLETIONS_MAX_TOKENS = 16
"""What /v1/completions writes where the body names no number of tokens."""


def check_endpoint(columns: Mapping[str, Any]) -> None:
    """Refuse a line that asks something else than text; a line without `method` and `url` asks for text.

    Raises:
        RequestError: another method or another endpoint is meant, or the body is of the other one.
    """
    method, url, body = columns.get("method"), columns.get("url"), columns.get("body")
    if method is not None and method != "POST":
        raise RequestError.invalid(f"method {_shown(method)}: only POST is answered")
    if url is None:
        return
    path = url.rstrip("/") if isinstance(url, str) else ""
    if not path.endswith(ENDPOINTS):
        raise RequestError.invalid(f"url {_shown(url)}: only {' and '.join(ENDPOINTS)} are answered")
    takes, other = ("messages", "prompt") if path.endswith(CHATS) else ("prompt", "messages")
    if isinstance(body, dict) and body.get(other) is not None:
        raise RequestError.invalid(f"url {_shown(url)} takes body.{takes}, not body.{other}")


def fields_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A body's fields under the names of `Job` and `SamplingParams`.

    Raises:
        RequestError: fields that would change the answer cannot be followed; each is named.
    """
    if faults := [fault for name, value in body.items() if (fault := _unsupported(name, value)) is not None]:
        more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        raise RequestError.invalid(f"not supported: {', '.join(faults[:MAX_FAULTS] + more)}")
    fields = {name: body[name] for name in READ & body.keys()}
    if body.get("tool_choice") == "none":
        fields.pop("tools", None)
    return fields


def defaults_of(url: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that an endpoint has where the body is silent; a null is not silence."""
    silent = body.keys().isdisjoint({"max_tokens", "max_completion_tokens"})
    if silent and isinstance(url, str) and url.rstrip("/").endswith(COMPLETIONS):
        return {"max_tokens": COMPLETIONS_MAX_TOKENS}
    return {}


def _unsupported(name: str, value: Any) -> str | None:
    """What of a field cannot be followed."""
    if name in READ or name in IDLE or value is None:
        return None
    if name not in ONLY:
        near = get_close_matches(name, READ, 1, 0.8)
        return f"body.{name}" + (f" (is {near[0]} meant?)" if near else "")
    if any(type(value) is type(one) and value == one for one in ONLY[name]):
        return None
    return f"body.{name} other than {' or '.join(map(json.dumps, ONLY[name]))}"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return shortened(text)
