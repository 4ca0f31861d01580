"""Questions made of columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from producer.bulk.wording import Wording
from producer.refusal import Refused
from protocol import RequestError
from tests.producer.bulk.orders import read_rows, write_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program

BODY = {"custom_id": "a", "body": {"messages": [{"role": "user", "content": "hi"}]}}


def test_a_template_makes_the_prompt(program: Program, url: str, tmp_path: Path) -> None:
    rows = [{"text": "Guten Tag", "to": "English"}, {"text": "no language"}]
    source = write_rows(tmp_path / "in.jsonl", rows)
    template = tmp_path / "prompt.jinja"
    template.write_text("Into {{ to }}: {{ text }}\n")
    command = ("generate", source, "-o", tmp_path / "out.jsonl", "--prompt-template")
    with FakeWorker(url):
        assert program(*command, f"@{template}").returncode == 3
        other = program(*command, "{{ text }}")
        assert (other.returncode, "prompt_template" in other.stderr) == (2, True)
    assert read_rows(tmp_path / "out.jsonl")[0]["completion"] == "Into English: Guten Tag\n"
    assert "'to' is undefined" in read_rows(tmp_path / "out.errors.jsonl")[0]["error"]["message"]


def test_templates_are_sandboxed_and_bounded() -> None:
    for template in (
        "{{ row.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{% for _ in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    ):
        wording = Wording(prompt_template=template)
        wording.check()
        with pytest.raises(RequestError, match="template"):
            wording.question({"a": 1})
    with pytest.raises(Refused, match="line 1"):
        Wording(prompt_template="{{ a").check()


def test_a_null_prompt_names_its_column() -> None:
    with pytest.raises(RequestError, match="'text' is null"):
        Wording(prompt_column="text").question({"text": None})


def test_columns_become_a_chat() -> None:
    turns = [{"role": "user", "content": "hi"}]
    assert Wording(system="Be brief.", prompt_column="q").question({"q": "why?"})["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "why?"},
    ]
    assert Wording(system="s").question({"messages": turns})["messages"][0]["role"] == "system"
    assert Wording(system="s").question({"messages": [{"role": "system", "content": "own"}, *turns]})[
        "messages"
    ][0] == {
        "role": "system",
        "content": "own",
    }
    assert Wording(prompt_column="chat").question({"chat": turns})["messages"] == turns
    assert Wording(chat=True).question({"prompt": "hi"})["messages"] == turns
    with pytest.raises(RequestError, match="no column 'q'"):
        Wording(prompt_column="q").question({"prompt": "hi"})
    with pytest.raises(Refused):
        Wording(prompt_column="q", prompt_template="{{ q }}").check()


@pytest.mark.parametrize("wording", [Wording(chat=True), Wording(system="Be brief.")])
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (BODY, "do not change the body of a batch file's row"),
        ({"question": "hi"}, "neither prompt nor messages: --prompt-column names"),
        ({"prompt": None, "body": "a text"}, "neither prompt nor messages: --prompt-column names"),
    ],
)
def test_a_row_that_asks_nothing_a_chat_could_be_made_of(
    wording: Wording, columns: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        wording.question(columns)


def test_chat_is_for_plain_rows_alone(program: Program, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [BODY, {"custom_id": "b", "prompt": "hi"}])
    checked = program("generate", source, "--check", "--chat", "--max-tokens", "3")
    assert (checked.returncode, "2 rows, 1 of them cannot be asked" in checked.stderr) == (3, True)
    assert "line 1: invalid_request: --system and --chat do not change the body" in checked.stderr
