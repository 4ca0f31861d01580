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
from protocol import ErrorCode, RequestError, SamplingParams

READ = frozenset(SamplingParams.model_fields) | RENDERING | {"prompt", "messages", "model"}
"""`model` is not compared with the one that answers."""
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


def fields_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A body's fields under the names of `Job` and `SamplingParams`.

    Raises:
        RequestError: a field that would change the answer cannot be followed.
    """
    for name, value in body.items():
        if name in READ or name in IDLE or value is None:
            continue
        if name not in ONLY:
            near = get_close_matches(name, READ, 1, 0.8)
            raise _invalid(f"not supported: body.{name}" + (f"; is {near[0]} meant?" if near else ""))
        if not any(type(value) is type(one) and value == one for one in ONLY[name]):
            allowed = " or ".join(map(json.dumps, ONLY[name]))
            raise _invalid(f"not supported: body.{name} other than {allowed}")
    fields = {name: body[name] for name in READ & body.keys()}
    if body.get("tool_choice") == "none":
        fields.pop("tools", None)
    if isinstance(turns := fields.get("messages"), list):
        fields["messages"] = [_without_nulls(turn) for turn in turns]
    return fields


def defaults_of(url: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that an endpoint has where the body is silent; a null is not silence."""
    path = url.rstrip("/") if isinstance(url, str) else ""
    silent = body.keys().isdisjoint({"max_tokens", "max_completion_tokens"})
    if silent and path.endswith("/completions") and not path.endswith("/chat/completions"):
        return {"max_tokens": COMPLETIONS_MAX_TOKENS}
    return {}


def _without_nulls(turn: Any) -> Any:
    """A turn as a reply of the API holds it, whose `refusal`, `audio` and `function_call` are null."""
    if not isinstance(turn, dict):
        return turn
    return {name: value for name, value in turn.items() if value is not None or name == "content"}


def _invalid(why: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, why)
