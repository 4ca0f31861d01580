"""Rows that cannot be answered, among rows that can, through a real model: each is its own error, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.producer.bulk.orders import read_rows, write_rows
from tests.producer.bulk.test_interrupted import Alone

CASES = Path(__file__).parents[2] / "engine" / "cases"

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


def rows_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((CASES / f"{name}.json").read_text())["input"]["rows"]
    return rows


def bad(row: dict[str, Any]) -> bool:
    return row.get("ok") is False or row.get("expect") == "row error"


def run(alone: Alone, rows: list[dict[str, Any]]) -> None:
    """A run with a worker of its own that ends by itself, with row errors."""
    write_rows(alone.source, rows)
    process = alone.start()
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 3, errors
    assert b"Traceback" not in errors


def test_good_and_bad_rows_in_one_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    """C01 and C03; the tiny model has a vocabulary of 512 and a tokenizer that adds no BOS."""
    known = ("prompt", "messages")
    rows = [row for name in ("C01", "C03") for row in rows_of(name)]
    asked = [{name: row[name] for name in known if name in row} for row in rows]
    asked.append({"prompt": "one more"})
    alone = Alone(tmp_path, str(tiny_model_dir))
    run(alone, [{**row, "max_tokens": 3} for row in asked])
    errors = read_rows(tmp_path / "out.errors.jsonl")
    wrong = [number for number, row in enumerate(rows, 1) if bad(row)]
    assert [error["line"] for error in errors] == wrong
    assert {error["error"]["code"] for error in errors} == {"invalid_request"}
    answers = read_rows(alone.output)
    assert len(answers) == len(asked) - len(wrong)
    several = [answer for answer in answers if isinstance(answer["prompt"], list) and "completions" in answer]
    assert [[choice["index"] for choice in answer["completions"]] for answer in several] == [[0, 1], [0, 1]]


def test_a_file_of_empty_prompts_ends(tiny_model_dir: Path, tmp_path: Path) -> None:
    run(Alone(tmp_path, str(tiny_model_dir)), [{"prompt": ""}] * 3)
    errors = read_rows(tmp_path / "out.errors.jsonl")
    assert [error["error"]["message"] for error in errors] == ["prompt is empty"] * 3
