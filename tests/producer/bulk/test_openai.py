"""Bodies of OpenAI's batch files: what is read, what changes nothing, what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from producer.bulk import openai
from producer.bulk.intake import ask
from producer.bulk.lines import BadRow, Line
from producer.bulk.requests import Requests
from protocol import Job

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def line(body: dict[str, Any], url: str | None = None, **defaults: Any) -> Job | BadRow:
    raw = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body}).encode()
    found = ask(Line(1, raw), Requests("run", defaults, None))
    return found if isinstance(found, BadRow) else found.job


@pytest.mark.parametrize(
    ("url", "body", "limit"),
    [
        ("/v1/chat/completions", CHAT, None),
        ("/v1/chat/completions", {**CHAT, "max_tokens": None}, None),
        ("/v1/completions", TEXT, 16),
        ("https://api.openai.com/v1/completions/", TEXT, 16),
        ("/v1/completions", {**TEXT, "max_tokens": None}, None),
        ("/v1/completions", {**TEXT, "max_tokens": 100_000}, 100_000),
        ("/v1/completions", {**TEXT, "max_completion_tokens": 7, "max_tokens": 20}, 7),
        ("/v1/completions", {**TEXT, "max_completion_tokens": 7}, 7),
        (None, TEXT, None),
    ],
)
def test_how_many_tokens_an_endpoint_means(url: str | None, body: dict[str, Any], limit: int | None) -> None:
    job = line(body, url)
    assert isinstance(job, Job), job.message
    assert job.params.token_limit == limit


def test_the_number_of_the_command_beats_the_endpoints() -> None:
    job = line(TEXT, "/v1/completions", max_completion_tokens=99)
    assert isinstance(job, Job)
    assert job.params.token_limit == 99
    plain = ask(Line(1, b'{"prompt": "x"}'), Requests("run", {}, None))
    assert not isinstance(plain, BadRow)
    assert plain.job.params.token_limit is None


@pytest.mark.parametrize("max_tokens", [0, -1, True, "16"])
def test_a_number_that_is_none_fails_alone(max_tokens: Any) -> None:
    bad = line({**TEXT, "max_tokens": max_tokens}, "/v1/completions")
    assert isinstance(bad, BadRow)
    assert bad.message.startswith("max_tokens: give a whole number, 1 or more")


def test_what_changes_nothing_is_accepted() -> None:
    idle = {name: {"any": ["thing"]} for name in openai.IDLE}
    plain = {name: values[0] for name, values in openai.ONLY.items()}
    job = line({**CHAT, **idle, **plain, "logprobs": False, "n": 1, "temperature": 1})
    bare = line({**CHAT, "logprobs": False, "n": 1, "temperature": 1})
    assert isinstance(job, Job)
    assert isinstance(bare, Job)
    same = {"id": "x", "params": job.params.model_copy(update={"seed": 0})}
    assert job.model_copy(update=same) == bare.model_copy(update=same)
    nulls = dict.fromkeys([*openai.ONLY, "audio", "functions", "reasoning_effort", "web_search_options"])
    assert isinstance(line({**CHAT, **nulls}), Job)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("echo", True),
        ("best_of", 3),
        ("best_of", 1.0),
        ("suffix", "the end"),
        ("stream", True),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("parallel_tool_calls", False),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("functions", TOOLS),
        ("function_call", "auto"),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("guided_json", {}),
        ("use_beam_search", True),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(field: str, value: Any) -> None:
    bad = line({**CHAT, field: value})
    assert isinstance(bad, BadRow)
    assert bad.message.startswith(f"not supported: body.{field}")


def test_a_field_that_is_nearly_one_of_ours_is_asked_about() -> None:
    bad = line({**CHAT, "max_tokns": 5})
    assert isinstance(bad, BadRow)
    assert bad.message == "not supported: body.max_tokns (is max_tokens meant?)"


def test_all_that_is_not_supported_is_named_at_once() -> None:
    bad = line({**CHAT, "echo": True, "user": "u", "max_tokns": 5, "functions": [], "top_p": 7})
    assert isinstance(bad, BadRow)
    assert bad.message == (
        "not supported: body.echo other than false, body.max_tokns (is max_tokens meant?), body.functions"
    )


EMBED = {"input": "x", "model": "m"}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            {"url": "/v1/embeddings", "body": EMBED},
            "url /v1/embeddings: only /v1/chat/completions and /v1/completions are answered",
        ),
        ({"url": "/v1/responses", "body": CHAT}, "url /v1/responses: only "),
        ({"url": "/v1/completions/x", "body": TEXT}, "url /v1/completions/x: only "),
        ({"url": "", "body": TEXT}, "url : only "),
        ({"url": 5, "body": TEXT}, "url 5: only "),
        (
            {"url": "/v1/chat/completions", "body": TEXT},
            "url /v1/chat/completions takes body.messages, not body.prompt",
        ),
        (
            {"url": "/v1/completions", "body": CHAT},
            "url /v1/completions takes body.prompt, not body.messages",
        ),
        ({"method": "GET", "url": "/v1/completions", "body": TEXT}, "method GET: only POST is answered"),
        ({"method": ["POST"], "body": TEXT}, 'method ["POST"]: only POST is answered'),
        ({"url": "/v1/completions"}, "there is neither prompt nor messages"),
    ],
    ids=str,
)
def test_what_asks_for_something_else_is_refused_by_name(columns: dict[str, Any], said: str) -> None:
    bad = ask(Line(1, json.dumps(columns).encode()), Requests("run", {}, None))
    assert isinstance(bad, BadRow)
    assert bad.message.startswith(said)


def test_a_line_may_be_silent_of_method_and_url_and_null_is_silence() -> None:
    for columns in ({}, {"method": None, "url": None}, {"method": "POST", "url": "/v1/chat/completions/"}):
        row = json.dumps({**columns, "body": {**CHAT, "prompt": None}}).encode()
        assert not isinstance(ask(Line(1, row), Requests("run", {}, None)), BadRow)


def test_tools_that_may_not_be_called_are_left_out() -> None:
    for choice, kept in [("auto", TOOLS), ("none", None), (None, TOOLS)]:
        job = line({**CHAT, "tools": TOOLS, "tool_choice": choice})
        assert isinstance(job, Job)
        assert job.tools == kept


def test_a_reply_of_the_api_is_a_turn() -> None:
    reply = {"role": "assistant", "content": "Hello", "refusal": None, "audio": None, "function_call": None}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "add"}}]}
    job = line({"messages": [*CHAT["messages"], reply, call]})
    assert isinstance(job, Job), job.message
    assert job.messages is not None
    assert [turn.content for turn in job.messages] == ["Hi", "Hello", None]
    bad = line({"messages": [{**reply, "refusal": "no"}]})
    assert isinstance(bad, BadRow)
    assert "refusal" in bad.message


def test_columns_of_a_plain_row_are_its_own() -> None:
    raw = json.dumps({**TEXT, "stream": True, "echo": 3, "user": "u", "tool_choice": "required"}).encode()
    assert not isinstance(ask(Line(1, raw), Requests("run", {}, None)), BadRow)
