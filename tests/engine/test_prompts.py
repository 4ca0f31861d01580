"""From a job's prompt to ids."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pydantic
import pytest

from engine.prompts import Prompts
from protocol import ErrorCode, Job, RequestError
from tests.engine.doubles import case
from tests.models import FIXTURES, byte_tokenizer


def encode(tokenizer: Any, **job: Any) -> list[int]:
    return Prompts(tokenizer).encode(Job.model_validate({"id": "job", **job}))


@pytest.mark.parametrize(
    "row", [row for row in case("C01")["rows"] if "prompt_tokens" in row], ids=lambda row: row["id"]
)
def test_nothing_is_stripped(smollm2: Any, row: dict[str, Any]) -> None:
    assert len(encode(smollm2, prompt=row["prompt"])) == row["prompt_tokens"]


def test_an_empty_text_is_no_tokens(smollm2: Any) -> None:
    assert encode(smollm2, prompt="") == []


REFUSED = [row for row in case("C06")["rows"] if "expect" in row]
PLAIN = [row for row in case("C06")["rows"] if row["messages"] == [{"role": "user", "content": ""}]]


@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_a_chat_is_rendered_exactly(smollm2: Any, row: dict[str, Any]) -> None:
    assert smollm2.decode(encode(smollm2, messages=row["messages"])) == row["prompt"]


@pytest.mark.parametrize("row", REFUSED, ids=str)
def test_what_is_no_chat_does_not_get_past_the_border(row: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        Job.model_validate({"id": "job", "messages": row["messages"]})


def test_without_a_chat_template_only_text_is_taken(smollm2: Any) -> None:
    bare = copy.deepcopy(smollm2)
    bare.chat_template = None
    with pytest.raises(RequestError, match="no chat template") as caught:
        encode(bare, messages=[{"role": "user", "content": "Hi"}])
    assert caught.value.code == ErrorCode.INVALID_REQUEST
    assert encode(bare, prompt="Hi") == smollm2.encode("Hi")


@pytest.mark.parametrize(
    ("roles", "quoted"),
    [
        (["system", "user"], "System role not supported"),
        (["user", "user"], "must alternate"),
        (["user"], None),
    ],
)
def test_what_the_template_says_is_passed_on(smollm2: Any, roles: list[str], quoted: str | None) -> None:
    strict = copy.deepcopy(smollm2)
    strict.chat_template = (FIXTURES / "template_nosystem.jinja").read_text()
    messages = [{"role": role, "content": "a"} for role in roles]
    if quoted is None:
        assert encode(strict, messages=messages)
        return
    with pytest.raises(RequestError, match=quoted) as caught:
        encode(strict, messages=messages)
    assert caught.value.code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[9]['content'] + 'x' }}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
    ids=["undefined", "arithmetic", "syntax", "escape"],
)
def test_a_template_that_fails_in_any_way_is_an_error_of_the_row(smollm2: Any, template: str) -> None:
    broken = copy.deepcopy(smollm2)
    broken.chat_template = template
    with pytest.raises(RequestError, match=r"the chat template refused the messages: .+"):
        encode(broken, messages=[{"role": "user", "content": "Hi"}])


def test_half_a_surrogate_pair_is_refused_with_its_place(smollm2: Any) -> None:
    # Validation refuses it already; a job made without validation must not reach the tokenizer either.
    job = Job.model_construct(id="job", prompt="ab\ud83d", messages=None)
    with pytest.raises(RequestError, match=r"prompt: .*character 2"):
        Prompts(smollm2).encode(job)


def test_bos_is_written_once() -> None:
    tokenizer = byte_tokenizer(512)
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    assert encode(tokenizer, prompt="a")[:1] == [1]
    assert encode(tokenizer, prompt="<s>a") == encode(tokenizer, prompt="a")
    chat = encode(tokenizer, messages=[{"role": "user", "content": "a"}])
    assert chat[:1] == [1]
    assert chat[1] != 1


def test_token_ids_come_back_as_they_are(smollm2: Any) -> None:
    assert encode(smollm2, prompt=[5, 0, 49151]) == [5, 0, 49151]


def test_threads_share_one_tokenizer(smollm2: Any) -> None:
    texts = [f"{'word ' * (index % 7)}{index}" for index in range(200)]
    prompts = Prompts(smollm2)
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda text: prompts.encode(Job(id="job", prompt=text)), texts))
    assert got == [smollm2.encode(text) for text in texts]
