"""What says how a prompt becomes tokens reaches the job from everywhere it can be written."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from millstream import AsyncClient, Client
from producer.bulk.intake import ask
from producer.bulk.lines import BadRow, Line
from producer.bulk.requests import Requests
from producer.request import RENDERING, build_job
from protocol import Job, RequestError
from tests.producer.bulk.orders import read_rows, write_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program
from tests.producer.queued import queued

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
]
FIELDS: dict[str, Any] = {
    "tools": [TOOL],
    "chat_template": "{{ messages[0].content }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "add_special_tokens": False,
    "split_special_tokens": True,
}


def row(columns: dict[str, Any], rendering: dict[str, Any] | None = None) -> Job | BadRow:
    found = ask(Line(1, json.dumps(columns).encode()), Requests("run", {}, None, rendering))
    return found if isinstance(found, BadRow) else found.job


def check(job: Job | BadRow, fields: dict[str, Any]) -> None:
    assert isinstance(job, Job), job.message
    for name in RENDERING:
        assert getattr(job, name) == fields.get(name, Job.model_fields[name].default), name


def test_a_chat_with_everything_reaches_the_job(program: Program, url: str, tmp_path: Path) -> None:
    assert FIELDS.keys() == RENDERING
    with Client(url) as client:
        client.submit(messages=CHAT, id="client", **FIELDS)

    async def submit() -> None:
        async with AsyncClient(url) as client:
            await client.submit(messages=CHAT, id="asyncio", **FIELDS)

    asyncio.run(submit())
    for job_id in ("client", "asyncio"):
        job = queued(url, job_id)
        check(job, FIELDS)
        assert job.messages is not None
        assert [turn.text for turn in job.messages] == ["2+2?", "", "4"]
        assert job.messages[1].tool_calls == [CALL]
    check(row({"messages": CHAT, **FIELDS}), FIELDS)
    check(row({"body": {"messages": CHAT, **FIELDS}}), FIELDS)

    for name, value in {"tools": FIELDS["tools"], "chat": CHAT}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    (tmp_path / "t.jinja").write_text(FIELDS["chat_template"])
    flags = ("--tools", tmp_path / "tools.json", "--chat-template", tmp_path / "t.jinja", "--continue")
    flags += ("--chat-template-kwargs", '{"enable_thinking": false}', "--split-special-tokens")
    done = program("submit", "--messages", tmp_path / "chat.json", "--id", "flags", *flags)
    assert done.returncode == 0, done.stderr
    without = ("add_generation_prompt", "add_special_tokens")
    check(queued(url, "flags"), {name: value for name, value in FIELDS.items() if name not in without})


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        ("one", "one"),
        ([1, 2], [1, 2]),
        ((1, 2), [1, 2]),
        (["one", "two"], ["one", "two"]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([(1, 2), (3,)], [[1, 2], [3]]),
    ],
)
def test_prompts_of_every_kind(prompt: Any, kept: Any) -> None:
    assert build_job(prompt, None, None, {}, None).prompt == kept


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": [[5], "x"]}, "prompt.1"),
        ({"prompt": [[5], []]}, "prompt.1"),
        ({"prompt": [True, False]}, "prompt.0"),
        ({"prompt": [1.5]}, "prompt.0"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x"] * 9, "n": 128}, "1152 choices"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "give a list of messages, not str"),
        ({"messages": [["user", "Hi"]]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "content is missing"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: give text or a list of text parts",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "unsupported content type 'image_url'",
        ),
        ({"prompt": "x", "tools": [TOOL]}, "tools go with messages"),
        ({"messages": CHAT, "tools": "add"}, "tools"),
        ({"messages": CHAT, "chat_template": ""}, "chat_template"),
        ({"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True}, "give one of"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_client_and_row(
    fields: dict[str, Any], said: str, url: str
) -> None:
    with Client(url) as client:
        with pytest.raises(RequestError) as caught:
            client.submit(**fields)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
        assert client.status().waiting == 0
    for columns in (fields, {"body": fields}):
        bad = row(columns)
        assert isinstance(bad, BadRow)
        assert said in bad.message


def test_defaults_of_a_run_hold_where_a_row_is_silent() -> None:
    chat, text = {"messages": CHAT}, {"prompt": "x"}
    check(
        row(chat, {"tools": [TOOL], "split_special_tokens": True}),
        {"tools": [TOOL], "split_special_tokens": True},
    )
    check(row(text, {"tools": [TOOL], "split_special_tokens": True}), {"split_special_tokens": True})
    check(row({**chat, "tools": []}, {"tools": [TOOL]}), {"tools": []})
    check(row({**chat, "tools": None}, {"tools": [TOOL]}), {"tools": [TOOL]})
    check(row({**text, "tools": None, "continue_final_message": False}), {})


def test_a_run_asked_with_another_template_is_another_run(program: Program, url: str, tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", [{"messages": CHAT}]), tmp_path / "out.jsonl"
    (tmp_path / "t.jinja").write_text("{{ messages }}" * 20)
    with FakeWorker(url) as worker:
        assert program("generate", source, "-o", output).returncode == 0
        refused = program("generate", source, "-o", output, "--chat-template", tmp_path / "t.jinja")
        assert (refused.returncode, "chat_template: not given, now {{ messages }}" in refused.stderr) == (
            2,
            True,
        )
        assert len(refused.stderr) < 500
        again = program("generate", source, "-o", output)
        assert (again.returncode, "nothing to do" in again.stderr, len(worker.answered)) == (0, True, 1)
    assert read_rows(output)[0]["completion"] == "4"
