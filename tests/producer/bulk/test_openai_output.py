"""`--format openai`: the lines are those of OpenAI's Batch API, as its own package reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from producer.bulk.generate import generate
from producer.bulk.interrupt import Interrupt
from producer.bulk.lines import Line, Row, RowFault, parse
from producer.bulk.manifest import Manifest
from producer.bulk.openai_output import OpenAILines
from producer.bulk.records import Record, of_bad_row, of_result
from producer.bulk.wording import Wording
from protocol import Choice, JobError, Result, Usage
from tests.producer.bulk.orders import order, read_rows, write_rows
from tests.producer.fake_worker import Failure, FakeWorker, echo
from tests.producer.program import Program

DATA = Path(__file__).parents[1] / "data"
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi there"}]


def batch(name: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", **body}}


def lines_of(wording: Wording = Wording(), id_column: str | None = None) -> OpenAILines:
    manifest = Manifest.new(None, {}, {}, wording, id_column=id_column, format="openai")
    return OpenAILines(manifest.model_copy(update={"served": "served", "created": 1_700_000_000}))


def record(columns: dict[str, Any], **result: Any) -> Record:
    row = parse(Line(7, json.dumps(columns).encode()))
    ended: dict[str, Any] = {
        "state": "succeeded",
        "usage": Usage(prompt_tokens=5, completion_tokens=3),
        **result,
    }
    return of_result(row, Result(id="a", seed=4, **ended))  # type: ignore[arg-type]


def choice(text: str, index: int = 0, **fields: Any) -> Choice:
    return Choice(index=index, text=text, token_ids=[], **{"finish_reason": "stop", **fields})


def told(token: str, *others: str) -> dict[str, Any]:
    top = [{"token_id": 9, "token": one, "logprob": -2.0} for one in others]
    return {"token_id": 1, "token": token, "logprob": -0.5, "rank": 1, "top_logprobs": top}


def line(columns: dict[str, Any], *choices: Choice, **lines: Any) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(lines_of(**lines).line(record(columns, choices=list(choices))))
    return written


@pytest.mark.parametrize("code", RowFault)
def test_whatever_is_wrong_with_a_row_is_a_bad_request(code: RowFault) -> None:
    bad = of_bad_row(Row(7, "0" * 16, {"custom_id": "a"}).bad(code, "why"))
    written = json.loads(lines_of().line(bad))
    assert written["response"]["status_code"] == 400
    assert written["response"]["body"]["error"]["code"] == code
    assert written["error"] == {"code": code, "message": "why", "line": 7}


def test_a_chat_is_what_the_endpoint_answers() -> None:
    written = line(batch("a", CHATS, messages=HI), choice("Hello", finish_reason="length"))
    name = written["id"].removeprefix("batch_req_")
    assert written == {
        "id": f"batch_req_{name}",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": f"req_{name}",
            "body": {
                "id": f"chatcmpl-{name}",
                "object": "chat.completion",
                "created": 1_700_000_000,
                "model": "served",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Hello", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "length",
                    }
                ],
                "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
                "system_fingerprint": None,
                "seed": 4,
            },
        },
        "error": None,
    }


def test_log_probabilities_have_the_shape_of_their_endpoint() -> None:
    logprobs = [told("He", "Ho"), told("\ufffd")]
    chat = line(batch("a", CHATS, messages=HI), choice("He\ufffd", logprobs=logprobs))
    (one,) = chat["response"]["body"]["choices"]
    assert one["logprobs"] == {
        "content": [
            {
                "token": "He",
                "logprob": -0.5,
                "bytes": [72, 101],
                "top_logprobs": [{"token": "Ho", "logprob": -2.0, "bytes": [72, 111]}],
            },
            {"token": "\ufffd", "logprob": -0.5, "bytes": None, "top_logprobs": []},
        ],
        "refusal": None,
    }
    text = line(batch("a", COMPLETIONS, prompt="x"), choice("He\ufffd", logprobs=logprobs, stop_reason="\n"))
    (one,) = text["response"]["body"]["choices"]
    assert one == {
        "index": 0,
        "text": "He\ufffd",
        "logprobs": {
            "tokens": ["He", "\ufffd"],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": [{"Ho": -2.0, "He": -0.5}, {"\ufffd": -0.5}],
            "text_offset": [0, 2],
        },
        "finish_reason": "stop",
        "stop_reason": "\n",
    }
    nothing = line(batch("a", COMPLETIONS, prompt="x"), choice("", logprobs=[]))
    assert set(map(tuple, nothing["response"]["body"]["choices"][0]["logprobs"].values())) == {()}


@pytest.mark.parametrize(
    ("columns", "wording", "chat"),
    [
        ({"prompt": "x"}, Wording(), False),
        ({"messages": HI}, Wording(), True),
        ({"prompt": None, "messages": HI}, Wording(), True),
        ({"body": {"prompt": "x"}}, Wording(), False),
        ({"body": {"messages": HI}}, Wording(), True),
        ({"url": f"https://api.openai.com{CHATS}/", "body": {"messages": HI}}, Wording(), True),
        ({"url": COMPLETIONS, "body": {"prompt": "x", "messages": None}}, Wording(), False),
        ({"prompt": "x"}, Wording(chat=True), True),
        ({"prompt": "x"}, Wording(system="Be brief."), True),
        ({"q": "x"}, Wording(prompt_column="q"), False),
        ({"q": HI}, Wording(prompt_column="q"), True),
        ({"q": "x"}, Wording(prompt_template="{{ q }}?"), False),
        ({"q": "x"}, Wording(prompt_template="{{ q }}?", chat=True), True),
    ],
    ids=str,
)
def test_a_row_is_answered_as_what_it_asked(columns: dict[str, Any], wording: Wording, chat: bool) -> None:
    body = line(columns, choice("y"), wording=wording)["response"]["body"]
    assert body["object"] == ("chat.completion" if chat else "text_completion")


@pytest.mark.parametrize(
    ("columns", "id_column", "name"),
    [
        ({"custom_id": "a"}, None, "a"),
        ({"custom_id": 17}, None, "17"),
        ({"id": "b"}, None, "b"),
        ({"custom_id": "a", "key": "c"}, "key", "c"),
        ({}, None, "line-7"),
        ({"custom_id": None}, None, "line-7"),
        ({"custom_id": ""}, None, "line-7"),
    ],
    ids=str,
)
def test_a_line_has_the_rows_own_name_or_its_place(
    columns: dict[str, Any], id_column: str | None, name: str
) -> None:
    assert line({"prompt": "x", **columns}, choice("y"), id_column=id_column)["custom_id"] == name


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("invalid_request", 400),
        ("context_length_exceeded", 400),
        ("model_not_found", 404),
        ("engine_error", None),
        ("crashed_worker", None),
        ("deadline_exceeded", None),
    ],
)
def test_what_was_refused_has_a_status_and_what_failed_has_none(code: str, status: int | None) -> None:
    failed = record(
        batch("a", CHATS, messages=HI), state="failed", error=JobError(code=code, message="why"), usage=None
    )
    written = json.loads(lines_of().line(failed))
    assert (written["custom_id"], written["error"]) == ("a", {"code": code, "message": "why", "line": 7})
    if status is None:
        assert written["response"] is None
        return
    assert written["response"]["status_code"] == status
    refusal = {"message": "why", "type": "invalid_request_error", "param": None, "code": code}
    assert written["response"]["body"] == {"error": refusal}


def test_every_fault_of_a_line_is_a_refusal_with_its_line_number(
    program: Program, url: str, tmp_path: Path
) -> None:
    """F03 and F05's shape."""
    with FakeWorker(url):
        done = program(
            "generate", DATA / "broken_lines.jsonl", "-o", tmp_path / "out.jsonl", "--format", "openai"
        )
    assert done.returncode == 3
    assert "16 failed" in done.stderr
    answers, errors = read_rows(tmp_path / "out.jsonl"), read_rows(tmp_path / "out.errors.jsonl")
    assert [row["custom_id"] for row in answers] == ["ok1", "ok3"]
    assert [row["error"]["line"] for row in errors] == list(range(2, 18))
    assert {row["response"]["status_code"] for row in errors} == {400}
    assert None in [row["custom_id"] for row in errors]
    assert len({row["id"] for row in [*answers, *errors]}) == 18


def fails_at_two(job: Any) -> str:
    if job.prompt == "p2":
        raise Failure("no luck")
    return echo(job)


def test_it_goes_on_when_the_input_grows_and_may_be_written_otherwise(
    program: Program, url: str, tmp_path: Path
) -> None:
    rows = [{"custom_id": f"k{number}", "prompt": f"p{number}"} for number in range(4)]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = ("generate", source, "-o", output)
    with FakeWorker(url, answer=fails_at_two) as worker:
        assert program(*command, "--format", "openai").returncode == 3
        before = output.read_bytes()
        assert "nothing to do" in program(*command, "--format", "openai").stderr
        write_rows(source, [*rows, {"custom_id": "k4", "prompt": "p4"}])
        assert program(*command, "--format", "openai").returncode == 3
        assert output.read_bytes().startswith(before)
        assert len(worker.answered) == 5

        assert program(*command).returncode == 3  # the same rows, as they are written without the flag
        assert [row["completion"] for row in read_rows(output)] == ["p0", "p1", "p3", "p4"]
        assert program(*command, "--format", "openai").returncode == 3
        assert output.read_bytes().startswith(before)
        assert read_rows(tmp_path / "out.errors.jsonl")[0]["error"]["message"] == "no luck"
        assert len(worker.answered) == 5


def test_openais_own_types_read_the_files(url: str, tmp_path: Path) -> None:
    from openai import types  # takes 0.7 s, in every process that collects tests
    from openai.types import chat as chats
    from openai.types import shared

    rows = [
        batch("plain", CHATS, messages=HI),
        batch("many", CHATS, messages=HI, n=3, logprobs=True, top_logprobs=2),
        batch("text", COMPLETIONS, prompt="one two three"),
        batch("prompts", COMPLETIONS, prompt=["a", "b"], n=2, logprobs=1),
        {"prompt": "a plain row"},
        batch("refused", CHATS, messages=HI, temperature=-1),
    ]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with FakeWorker(url):
        generate(order(source, output, url, format="openai", bad_ids="rows"), Interrupt())
    replies = {row["custom_id"]: row["response"] for row in read_rows(output)}
    kinds = {"plain": chats.ChatCompletion, "many": chats.ChatCompletion}
    for name, response in replies.items():
        kind = kinds.get(name, types.Completion)
        read = kind.model_validate_json(json.dumps(response["body"]), strict=True)
        assert [one.index for one in read.choices] == list(range(len(read.choices)))
        assert read.model == "m"
        assert read.usage.total_tokens == read.usage.prompt_tokens + read.usage.completion_tokens
    assert {name: len(response["body"]["choices"]) for name, response in replies.items()} == {
        "plain": 1,
        "many": 3,
        "text": 1,
        "prompts": 4,
    }
    many = chats.ChatCompletion.model_validate(replies["many"]["body"])
    assert "".join(one.token for one in many.choices[1].logprobs.content) == many.choices[1].message.content
    errors = read_rows(tmp_path / "out.errors.jsonl")
    assert [row["error"]["line"] for row in errors] == [5, 6]
    for row in errors:
        shared.ErrorObject.model_validate(row["response"]["body"]["error"], strict=True)
        types.BatchError.model_validate(row["error"], strict=True)


def test_rows_that_ask_for_something_else_are_errors_in_the_same_shape(
    program: Program, url: str, tmp_path: Path
) -> None:
    """F05. Where a body names no model (m9), the one that is served answers."""
    with FakeWorker(url, model="m"):
        program("generate", DATA / "F05.jsonl", "-o", tmp_path / "out.jsonl", "--format", "openai")
    answers, errors = read_rows(tmp_path / "out.jsonl"), read_rows(tmp_path / "out.errors.jsonl")
    assert [row["custom_id"] for row in answers] == ["m1", "m7", "m9", "m11"]
    other = errors.pop(0)
    assert (other["custom_id"], other["error"]["code"]) == ("m2", "model_not_found")
    said = {
        "m3": "url /v1/images",
        "m4": "method GET",
        "m5": "body.stream",
        "m6": "url v1/chat",
        "m8": "takes body.prompt",
        "m10": "unknown",
    }
    for row, (name, words) in zip(errors, said.items(), strict=True):
        assert (row["custom_id"], row["response"]["status_code"]) == (name, 400)
        assert words in row["error"]["message"]
