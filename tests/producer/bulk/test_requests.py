"""A row that asks as an earlier one did becomes the same job as if it were the only one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.bulk import requests as module
from producer.bulk.intake import ask
from producer.bulk.lines import BadRow, Kind, Line, Row
from producer.bulk.requests import Requests
from producer.bulk.wording import Wording
from protocol import Job

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.none() | st.text(max_size=5) | st.sampled_from([[1, 2], ["a", "b"], 7, "x" * 70_000]),
    "messages": st.none()
    | st.lists(
        st.sampled_from(
            [
                {"role": "user", "content": "é\n\1"},
                {"role": "assistant", "content": "b", "name": None},
                {"role": "user", "content": [{"type": "text", "text": "c"}]},
                {"role": "user", "content": "d", "unknown": "e"},
                {"role": "user"},
            ]
        ),
        max_size=3,
    ),
    "max_tokens": st.sampled_from([None, 1, 1.0, True, "1", 16, 0]),
    "temperature": st.sampled_from([None, 0, 0.5, "0.5"]),
    "seed": st.sampled_from([None, 0, 1, True, 2**63, 2**64, -1, "1"]),
    "stop": st.sampled_from([None, "a", ["a"], "1", 1]),
    "logit_bias": st.sampled_from([None, {"1": 1.5}, {"x": 1}]),
    "tools": st.none() | st.just([{"type": "function", "function": {"name": "f", "x": None}}]),
    "add_special_tokens": st.sampled_from([None, True, False, 1]),
    "topic": st.text(max_size=2),
}
COLUMNS = st.fixed_dictionaries({}, optional=VALUES)
BATCH = st.sampled_from(["/v1/completions", "/v1/chat/completions"]).flatmap(
    lambda url: st.fixed_dictionaries({"url": st.just(url), "body": COLUMNS})
)
KINDS: tuple[Kind, ...] = ("json", "text", "typed")


def job_of(columns: dict[str, Any], kind: Kind, number: int, requests: Requests) -> Job | tuple[str, str]:
    """The job of a row, or what is wrong with it."""
    found = ask(Line(number, json.dumps(columns).encode(), kind=kind), requests)
    if isinstance(found, BadRow):
        return found.code, found.message
    assert found.row_job.id == found.job.id
    assert (found.row_job.prompt, found.row_job.messages) == (found.job.prompt, found.job.messages)
    assert found.row_job.like.params.token_limit == found.job.params.token_limit
    return found.job


@settings(max_examples=30)
@given(
    st.lists(COLUMNS | BATCH, min_size=1, max_size=6),
    st.sampled_from(KINDS),
    st.sampled_from([{}, {"max_tokens": 9, "seed": 4}, {"temperature": 0.0}]),
    st.sampled_from([Wording(), Wording(system="be brief"), Wording(chat=True)]),
)
def test_any_row_among_others(
    rows: list[dict[str, Any]], kind: Kind, defaults: dict[str, Any], wording: Wording
) -> None:
    def requests() -> Requests:
        return Requests("run", defaults, "m", {"add_generation_prompt": True}, wording)

    if kind == "text":
        rows = [{name: _cell(value) for name, value in columns.items()} for columns in rows]
    together = requests()
    for number, columns in enumerate([*rows, *rows], 1):
        assert job_of(columns, kind, number, together) == job_of(columns, kind, number, requests())


def _cell(value: Any) -> str:
    """A value in a table of text."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def test_a_row_like_another_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests("run", {}, None)
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "max_tokens": 3},
        {"messages": [{"role": "user", "content": "b"}], "temperature": 0.5},
    ]
    for columns in rows:
        job_of(columns, "json", 1, requests)
    monkeypatch.setattr(module, "build_job", None)
    for number in range(2, 5):
        for columns in rows:
            job = job_of({**columns, "seed": number, "topic": number}, "json", number, requests)
            assert isinstance(job, Job)
            assert job.seed == number


def test_a_template_that_writes_half_a_character_is_that_rows_error() -> None:
    requests = Requests("run", {}, None, {}, Wording(prompt_template=r"{{ '\ud800' if bad else 'x' }}"))
    found = [job_of({"bad": bad}, "json", 1, requests) for bad in (False, True, False)]
    assert [isinstance(one, Job) for one in found] == [True, False, True]
    assert "surrogate" in found[1][1]  # type: ignore[index]


def test_jobs_near_a_limit_are_no_pattern() -> None:
    requests = Requests("run", {"n": 128, "max_tokens": 50_000}, None)
    assert isinstance(job_of({"prompt": "a"}, "json", 1, requests), Job)
    assert requests._patterns == {}


@pytest.mark.parametrize(
    ("named", "asked"), [(None, None), ("as --model says", None), ("another", "another")]
)
def test_a_batch_line_may_name_the_model_as_the_command_does(named: str | None, asked: str | None) -> None:
    requests = Requests("run", {}, None, known_as="as --model says")
    for number in range(2):  # the second by the first one's pattern
        body = {"model": named, "prompt": f"p{number}"}
        found = requests.row_job(Row(1, "0" * 16, {"custom_id": "a", "body": body}))
        assert found.job.model == asked
    beside = requests.row_job(Row(2, "0" * 16, {"prompt": "p", "model": "a column"}))
    assert beside.job.model is None
