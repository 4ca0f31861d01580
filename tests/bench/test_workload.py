"""The two workloads: the same rows every time, and as many tokens as the page says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench import workload
from bench.workload import Row, Task
from engine.gguf_cache import converted
from tests.bench.doubles import Words


@pytest.mark.model
def test_the_workloads_are_the_published_ones(smollm2_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted(smollm2_path)[0])
    rows = workload.load(tokenizer)
    prompts, outputs = [len(row.prompt_ids) for row in rows], [row.max_tokens for row in rows]
    assert (len(rows), sum(prompts), min(prompts), max(prompts)) == (128, 11_648, 54, 158)
    assert (sum(outputs), min(outputs), max(outputs)) == (15_331, 47, 370)
    shared = [row.prompt_ids for row in workload.shared_prefix(tokenizer)]
    assert (len(shared), sum(map(len, shared)), workload.distinct_tokens(shared)) == (500, 169_815, 34_017)


def test_every_topic_asks_every_question_under_one_prompt_in_no_order() -> None:
    rows = workload.shared_prefix(Words())
    tokenizer = Words()
    systems: Counter[tuple[int, ...]] = Counter()
    user = tokenizer.encode("<user>", add_special_tokens=False)
    again = workload.shared_prefix(tokenizer)
    for row in again:
        end = row.prompt_ids.index(user[0])
        systems[tuple(row.prompt_ids[:end])] += 1
    assert sorted(systems.values()) == [100] * 5
    assert len({tuple(row.prompt_ids) for row in again}) == 500
    in_a_row = [tuple(row.prompt_ids[:20]) for row in again[:50]]
    assert len(set(in_a_row)) == 5, "the topics are mixed"
    first = [(len(row.prompt_ids), row.max_tokens) for row in rows]
    assert first == [(len(row.prompt_ids), row.max_tokens) for row in again]


def test_fewer_rows_have_every_topic_too() -> None:
    rows = workload.shared_prefix(Words(), 10)
    assert len(rows) == 10
    assert len({tuple(row.prompt_ids[:20]) for row in rows}) == 5


@pytest.mark.parametrize(
    ("prompts", "nodes"),
    [
        ([], 0),
        ([[1, 2, 3]], 3),
        ([[1, 2, 3], [1, 2, 3]], 3),
        ([[1, 2, 3], [1, 2, 4], [1, 5]], 5),
        ([[1, 2], [1, 2, 3], [2, 2], [1]], 5),
        ([[9, 1], [8, 1]], 4),
    ],
)
def test_the_fewest_tokens_are_the_nodes_of_a_trie(prompts: list[list[int]], nodes: int) -> None:
    assert workload.distinct_tokens(prompts) == nodes
    assert workload.distinct_tokens(reversed(prompts)) == nodes


def test_a_task_survives_the_pipe() -> None:
    task = Task("some", 2, [Row([1, 2], 3), Row([4], 5).salted([7, 8])])
    assert Task.from_dict(task.to_dict()) == task
    assert task.rows[1].prompt_ids == [7, 8, 4]
