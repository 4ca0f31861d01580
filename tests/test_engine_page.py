"""The Python of docs/engine.md runs, on the tiny model."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "engine.md"


def test_the_blocks_run_one_after_the_other(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    monkeypatch.chdir(tiny_model_dir.parent)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block.replace("path/to/model.gguf", tiny_model_dir.name), names)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4, "two results, the texts of three choices, and how a job ended: no error"
    parts = names["parts"]
    assert isinstance(parts, dict)
    assert set(parts) == {("a", 0), ("b", 0), ("b", 1)}


def test_the_table_has_every_keyword() -> None:
    from engine.loading import RunnerOptions, load_engine

    table = PAGE.read_text().split("## ")[0]
    named = {
        name
        for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    taken = set(inspect.signature(load_engine).parameters) - {"model", "options"}
    assert named == taken | set(RunnerOptions.__annotations__)
