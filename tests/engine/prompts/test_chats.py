"""Chats through the model's template, or the job's."""

from __future__ import annotations

import inspect
import resource
import threading
import time
from typing import Any, Self

import pydantic
import pytest

from engine import chat as chat_module
from engine.trial import Trial, TrialFailed
from protocol import ErrorCode, RequestError
from protocol.job import RESERVED
from tests.engine.doubles import case
from tests.engine.prompts.making import HI, SHOW_ALL, encode, make, rendered, with_template
from tests.models import FIXTURES

TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system' }}{% for tool in tools %}"
    "{{ '\n' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role }}"
    "{% if message.name is defined %}{{ ' ' + message.name }}{% endif %}{{ '\n' }}"
    "{% if message.reasoning_content is defined %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls %}{{ '<tool_call>' + call.function.name }}"
    "{% for key, value in call.function.arguments.items() %}{{ ' ' + key + '=' + value | tojson }}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}"
    "{% if message.tool_call_id is defined %}{{ ' (answers ' + message.tool_call_id + ')' }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('<think>' if thinking else '') }}{% endif %}"
)
"""Written as the models' own are that know tools."""


REFUSED = [row for row in case("C06")["rows"] if "expect" in row]
TAKEN = [row for row in case("C06")["rows"] if "prompt" in row]


@pytest.mark.parametrize("row", TAKEN, ids=range(len(TAKEN)))
def test_a_chat_is_rendered_exactly(smollm2: Any, row: dict[str, Any]) -> None:
    assert rendered(smollm2, messages=row["messages"]) == row["prompt"]


@pytest.mark.parametrize("row", REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_chat_does_not_get_past_the_border(row: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        make(messages=row["messages"])


def test_tools_calls_and_their_answers_reach_the_template(smollm2: Any) -> None:
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
    }
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": "é"}'}}
    messages = [
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": t} for t in ("2", "+2?")]},
        {"role": "assistant", "content": None, "reasoning_content": "easy", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    job = {"messages": messages, "tools": [tool], "chat_template": TOOLS_TEMPLATE}
    turns = (
        "<|im_start|>system\nadd(a, b)<|im_end|>\n"
        "<|im_start|>user Ann\n2+2?<|im_end|>\n"
        '<|im_start|>assistant\n<think>easy</think><tool_call>add a=2 b="é"</tool_call><|im_end|>\n'
        "<|im_start|>tool\n4 (answers c1)<|im_end|>\n"
    )
    assert rendered(smollm2, **job) == turns + "<|im_start|>assistant\n"
    assert rendered(smollm2, **job, add_generation_prompt=False) == turns
    thinking = rendered(smollm2, **job, chat_template_kwargs={"thinking": True})
    assert thinking == turns + "<|im_start|>assistant\n<think>"
    assert call["function"]["arguments"] == '{"a": 2, "b": "é"}', "the caller's own is left as it was"


@pytest.mark.parametrize("arguments", ["", "[1]", "not JSON", "3", {"a": 1}, "[" * 100_000])
def test_arguments_that_are_no_object_are_handed_on_as_they_came(smollm2: Any, arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    template = "{{ messages[0].tool_calls[0].function.arguments }}"
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert rendered(smollm2, messages=messages, chat_template=template) == str(arguments)


def test_fields_that_are_not_set_are_not_defined(smollm2: Any) -> None:
    template = "{{ messages[0].keys() | join(',') }}|{{ tools is none }}|{{ messages[0].name is defined }}"
    assert rendered(smollm2, messages=HI, chat_template=template) == "role,content|True|False"


def test_variables_cannot_take_the_place_of_what_a_job_has_fields_for(smollm2: Any) -> None:
    arguments = set(inspect.signature(smollm2.apply_chat_template).parameters) - {"kwargs", "documents"}
    assert arguments <= RESERVED
    for name in RESERVED:
        with pytest.raises(pydantic.ValidationError, match=rf"chat_template_kwargs: {name} cannot be set"):
            make(messages=HI, chat_template_kwargs={name: 1})
    variables = {"documents": [{"title": "T", "text": "x"}], "bos_token": "B"}
    template = "{{ documents[0].title }}{{ bos_token }}{{ eos_token }}"
    assert rendered(smollm2, messages=HI, chat_template=template, chat_template_kwargs=variables) == (
        "TB<|im_end|>"
    )


def test_the_last_message_is_gone_on_from(smollm2: Any) -> None:
    messages = [*HI, {"role": "assistant", "content": "Once upon"}]
    text = rendered(smollm2, messages=messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon")
    assert rendered(smollm2, messages=messages).endswith("Once upon<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_of_the_job_takes_the_place_of_the_models(smollm2: Any) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}!"
    assert rendered(smollm2, messages=HI, chat_template=template) == "<|im_start|>Hi!"
    bare = with_template(smollm2, None)
    assert rendered(bare, messages=HI, chat_template=template) == "<|im_start|>Hi!"
    several = with_template(smollm2, {"default": "one", "tool_use": "two", "other": "three"})
    assert rendered(several, messages=HI) == "one"
    assert rendered(several, messages=HI, tools=[{"type": "function"}]) == "two"
    assert rendered(several, messages=HI, chat_template="other") == "three"


def test_without_a_chat_template_only_text_is_taken(smollm2: Any) -> None:
    bare = with_template(smollm2, None)
    refused, taken = case("C05")["a"]["rows"]
    with pytest.raises(RequestError, match="no chat template") as caught:
        encode(bare, messages=refused["messages"])
    assert caught.value.code == ErrorCode.INVALID_REQUEST
    assert encode(bare, prompt=taken["prompt"]) == smollm2.encode(taken["prompt"])


@pytest.mark.parametrize("row", case("C05")["b"]["rows"], ids=range(3))
def test_what_the_template_says_is_passed_on(smollm2: Any, row: dict[str, Any]) -> None:
    strict = with_template(smollm2, (FIXTURES / "template_nosystem.jinja").read_text())
    if row["expect"] == "ok":
        assert rendered(strict, messages=row["messages"]) == (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )
        return
    quoted = row["expect"].split('"')[1]
    with pytest.raises(RequestError, match=quoted) as caught:
        encode(strict, messages=row["messages"])
    assert caught.value.code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[9]['content'] + 'x' }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ raise_exception('two\nlines') }}",
        "{% include 'elsewhere' %}",
        "{{ messages.append(1) }}",
    ],
    ids=["undefined", "arithmetic", "escape", "recursion", "range", "lines", "include", "change"],
)
@pytest.mark.parametrize("whose", ["the model's", "the job's"])
def test_a_template_that_fails_in_any_way_is_an_error_of_the_row(
    smollm2: Any, template: str, whose: str
) -> None:
    owner = with_template(smollm2, template if whose == "the model's" else None)
    given = {} if whose == "the model's" else {"chat_template": template}
    with pytest.raises(RequestError, match=r"^the chat template refused the messages: [^\n]+$"):
        encode(owner, messages=HI, **given)


@pytest.mark.parametrize(
    "template", ["a\n{% if %}", "\n{{ messages", "\n{% unknown %}", "\n{{ 1 | no_filter }}"]
)
def test_a_template_that_is_none_is_told_apart_from_one_that_refuses(smollm2: Any, template: str) -> None:
    with pytest.raises(RequestError, match=r"^chat_template is no valid template: line 2: [^\n]+$"):
        encode(smollm2, messages=HI, chat_template=template)
    with pytest.raises(
        RequestError, match=r"^the model's chat template is no valid template: line 2: [^\n]+$"
    ):
        encode(with_template(smollm2, template), messages=HI)


class LongestPause:
    """How long, at most, no other thread of this process ran meanwhile."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        last = time.monotonic()
        while not self._over.wait(0.02):
            self.seconds, last = max(self.seconds, time.monotonic() - last), time.monotonic()


FOR_EVER = [
    pytest.param("{{ (987654321 ** 4000000) > 0 }}", id="one power"),
    *(
        pytest.param(body, id=name, marks=pytest.mark.long)
        for name, body in {
            "silent": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
            "writing": "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
            "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
            "one product": "{{ 'x' * 10 ** 10 }}",
            "doubled": "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        }.items()
    ),
]


@pytest.mark.parametrize("body", FOR_EVER)
def test_a_template_of_a_job_costs_nothing_but_its_job(
    smollm2: Any, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads go on meanwhile, this process takes no memory, and the next template is rendered."""
    assert rendered(smollm2, messages=HI, chat_template="{{ messages[0].content }}") == "Hi"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with monkeypatch.context() as patched, LongestPause() as pause:
        patched.setattr(chat_module, "TEMPLATE_SECONDS", 0.2)
        with pytest.raises(RequestError, match=r"more than 0\.2 s|more than 2 GiB"):
            encode(smollm2, messages=HI, chat_template=body)
    assert pause.seconds < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert rendered(smollm2, messages=HI, chat_template="{{ messages[0].content }}") == "Hi"


def test_a_template_that_could_not_be_tried_may_pass(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise TrialFailed("no process")

    monkeypatch.setattr(Trial, "ask", fail)
    with pytest.raises(RequestError, match="chat_template: no process") as raised:
        encode(smollm2, messages=HI, chat_template="{{ messages[0].content }}")
    assert raised.value.code is ErrorCode.DEVICE_ERROR


def test_what_a_template_writes_has_a_bound(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "MAX_CHARACTERS", 100)
    assert len(rendered(smollm2, messages=HI, chat_template="{{ 'x' * 100 }}")) == 100
    with pytest.raises(RequestError, match=r"wrote 101 characters, at most 100"):
        encode(smollm2, messages=HI, chat_template="{{ 'x' * 101 }}")


def test_nul_is_kept(smollm2: Any) -> None:
    assert "<|im_start|>user\na\0b<|im_end|>" in rendered(
        smollm2, messages=[{"role": "user", "content": "a\0b"}]
    )


@pytest.mark.parametrize(
    ("job", "place"),
    [
        ({"prompt": "ab\ud83d"}, "prompt: .*character 2"),
        ({"prompt": ["ok", "\ud83d"]}, r"prompt\[1\]: .*character 0"),
        ({"messages": [{"role": "user", "content": "a\udc00"}]}, r"messages\.0\.content: .*character 1"),
        ({"messages": [{"role": "user", "content": "", "name": "\ud83d"}]}, r"messages\.0\.name: "),
        (
            {"messages": HI, "tools": [{"function": {"name": "f", "description": "é\ud83d"}}]},
            r"tools\.0\.function\.description: .*character 1",
        ),
        ({"messages": HI, "tools": [{"\ud83d": 1}]}, r"tools\.0: a key: "),
        ({"messages": HI, "chat_template_kwargs": {"extra": "\ud83d"}}, r"chat_template_kwargs\.extra: "),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"arguments": '{"a": "\\ud83d"}'}}]}
                ]
            },
            r"messages\.0\.tool_calls\.0\.function\.arguments\.a: .*character 0",
        ),
        ({"messages": HI, "chat_template": "{{ '\\ud83d' }}"}, "the rendered chat: .*character 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_half_a_surrogate_pair_is_refused_with_its_place(smollm2: Any, job: Any, place: str) -> None:
    with pytest.raises(RequestError, match=place) as caught:
        encode(with_template(smollm2, SHOW_ALL), **job)
    assert caught.value.code == ErrorCode.INVALID_REQUEST
