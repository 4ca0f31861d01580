"""The order in which rows are asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.bulk.intake import Ask
from producer.bulk.lines import Row
from producer.bulk.plan import BLOCK, in_order, planned, prompt_text
from producer.bulk.records import Record
from producer.bulk.requests import RowJob
from producer.request import build_job
from tests.producer.bulk.orders import read_rows, write_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program

TOPICS = [letter * 2 * BLOCK for letter in "abc"] + ["a" * 2 * BLOCK + "d" * BLOCK]
SIZE = 7


def row(number: int, prompt: Any = "?", max_tokens: int | None = 16, **chat: Any) -> Ask:
    """A row of the input."""
    sampling = {} if max_tokens is None else {"max_tokens": max_tokens}
    job = build_job(
        None if "messages" in chat else prompt, chat.pop("messages", None), None, sampling, "x", **chat
    )
    return Ask(Row(number, "digest", {}), RowJob.of(job), SIZE)


def lines(asks: Iterable[Ask | Record]) -> list[int]:
    """Where rows stand in the input."""
    return [ask.row.line for ask in asks if isinstance(ask, Ask)]


_prompts = st.tuples(st.sampled_from(TOPICS), st.text("xyz\n\u2028é", max_size=2 * BLOCK)).map("".join)
_asked = st.tuples(_prompts, st.none() | st.sampled_from([1, 16, 4000]))
_bad = st.just(None)


@st.composite
def inputs(draw: st.DrawFn) -> list[Ask | Record]:
    """Rows of few topics, and bad ones among them."""
    found = draw(st.lists(_asked | _bad, max_size=40))
    return [
        Record(number, "digest", False, b"{}") if one is None else row(number, one[0], one[1])
        for number, one in enumerate(found)
    ]


class Counted:
    """An input that knows how much of it is held, and that no more is taken than may be."""

    def __init__(self, rows: Sequence[Ask | Record], most_rows: int, most_bytes: int) -> None:
        self._rows = iter(rows)
        self._most_rows = most_rows
        self._most_bytes = most_bytes
        self.held = 0

    def __iter__(self) -> Iterator[Ask | Record]:
        return self

    def __next__(self) -> Ask | Record:
        assert self.held < self._most_rows
        assert self.held * SIZE < self._most_bytes
        one = next(self._rows)
        self.held += isinstance(one, Ask)
        return one


@given(inputs(), st.integers(1, 12), st.integers(1, 12 * SIZE), st.integers(1, 50))
def test_each_row_once_within_the_bounds(
    rows: list[Ask | Record], most_rows: int, most_bytes: int, first_rows: int
) -> None:
    source = Counted(rows, most_rows, most_bytes)
    found = []
    for one in planned(source, most_rows, most_bytes, first_rows):
        source.held -= isinstance(one, Ask)
        found.append(one)
    assert sorted(lines(found)) == lines(rows)
    assert [one for one in found if isinstance(one, Record)] == [
        one for one in rows if isinstance(one, Record)
    ]
    assert lines(planned(rows, most_rows, most_bytes, first_rows)) == lines(found)


@given(inputs())
def test_rows_that_share_a_prefix_are_neighbours(rows: list[Ask | Record]) -> None:
    """Whole blocks of every length, as a KV pool holds them."""
    texts = [prompt_text(ask.row_job) for ask in planned(rows) if isinstance(ask, Ask)]
    for blocks in range(1, 5):
        beginnings = [text[: blocks * BLOCK] for text in texts if len(text) >= blocks * BLOCK]
        met = [beginning for beginning, _ in groupby(beginnings)]
        assert len(met) == len(set(met))


def test_records_do_not_wait_for_rows() -> None:
    rows = [row(1), Record(2, "digest", False, b"{}"), row(3)]
    assert isinstance(next(planned(rows)), Record)


def test_the_first_row_comes_soon_and_then_more_are_looked_at_each_time() -> None:
    """Each time the row with most to write is asked first: as far as it is found, so far they were looked at."""
    source = Counted([row(number, max_tokens=number + 1) for number in range(100)], 40, 1 << 20)
    given_out = planned(source, 40, 1 << 20, 10)
    for taken in (10, 20, 40):
        best = next(given_out)
        source.held -= 1
        assert isinstance(best, Ask)
        first = best.row.line - taken + 1
        assert lines([best]) == [first + taken - 1]
        for _ in range(taken - 1):
            next(given_out)
            source.held -= 1


def test_a_long_output_at_the_end_of_the_input_is_not_asked_last() -> None:
    rows = [row(number) for number in range(11)] + [row(11, max_tokens=1000)]
    assert lines(planned(rows, first_rows=8))[-1] != 11


def test_prefixes_with_most_to_write_for_what_they_read_come_first() -> None:
    reads = [row(number, TOPICS[0] + 4 * BLOCK * str(number), 16) for number in range(3)]
    writes = [row(number, TOPICS[1] + str(number), 16) for number in range(3, 6)]
    alone = [row(number, 9 * BLOCK * str(number), 16) for number in range(6, 9)]
    assert lines(in_order([*reads, *alone, *writes])) == [3, 4, 5, 0, 1, 2, 6, 7, 8]


def test_rows_without_a_common_prefix_come_by_what_they_may_write_then_by_what_they_read() -> None:
    rows = [row(1, "c", 16), row(2, "bbb", 16), row(3, "a", None), row(4, "dd", 17), row(5, "e", 16)]
    assert lines(in_order(rows)) == [3, 4, 2, 1, 5]


def test_choices_count_as_output() -> None:
    rows = [row(1, max_tokens=16), row(2, max_tokens=10)]
    several = build_job("?", None, None, {"max_tokens": 10, "n": 2}, "x")
    assert lines(in_order([rows[0], Ask(rows[1].row, RowJob.of(several), SIZE)])) == [2, 1]


@pytest.mark.parametrize(
    "ask",
    [
        lambda system, question: {"messages": [{"role": "system", "content": system}, *_user(question)]},
        lambda system, question: {
            "messages": [{"role": "system", "content": [{"type": "text", "text": system}]}, *_user(question)]
        },
        lambda system, question: {
            "messages": _user(question),
            "tools": [{"type": "function", "function": {"name": system}}],
        },
        lambda system, question: {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": system}}]},
                *_user(question),
            ]
        },
        lambda system, question: {"prompt": [ord(letter) for letter in system + question]},
        lambda system, question: {"prompt": [system, question]},
    ],
    ids=["chat", "parts", "tools", "calls", "ids", "prompts"],
)
def test_what_prompts_begin_with_is_found_wherever_it_stands(ask: Any) -> None:
    questions = [(topic, 3 * BLOCK * letter) for letter in "xyz" for topic in TOPICS[:3]]
    asks = [row(number, **ask(*question)) for number, question in enumerate(questions)]
    topics = [line % 3 for line in lines(in_order(asks))]
    assert len(list(groupby(topics))) == 3


def _user(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_a_run_asks_in_that_order_and_answers_in_that_of_the_input(
    program: Program, url: str, tmp_path: Path
) -> None:
    rows = [{"prompt": TOPICS[number % 3] + str(number)} for number in range(30)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    outputs = []
    for flag, groups in (("--plan", 3), ("--no-plan", 30)):
        output = tmp_path / f"out{flag}.jsonl"
        with FakeWorker(url) as worker:
            assert program("generate", source, "-o", output, flag).returncode == 0
        topics = [(int(job.split(".")[1]) - 1) % 3 for job in worker.answered]
        assert (len(topics), len(list(groupby(topics)))) == (30, groups)
        outputs.append(read_rows(output))
    assert [answer["completion"] for answer in outputs[0]] == [one["prompt"] for one in rows]
    assert [answer["completion"] for answer in outputs[0]] == [answer["completion"] for answer in outputs[1]]
