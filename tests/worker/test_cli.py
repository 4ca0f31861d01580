"""The worker's help says what it does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.__main__ import build

PAGE = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()


@pytest.mark.parametrize(
    "keyword",
    [
        "admission",
        "block_size",
        "compile",
        "device",
        "dtype",
        "kv_dtype",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_step_ms",
        "quantization",
    ],
)
def test_the_help_shows_the_defaults_of_the_page(keyword: str) -> None:
    text = CliRunner().invoke(build(), ["worker", "--help"], env={"COLUMNS": "80"}).output
    row = re.search(rf"^\| `{keyword}` \| (.*?) \|", PAGE, re.MULTILINE)
    option = re.search(rf"--{keyword.replace('_', '-')} .*?\[default: (.*?)[;\]]", " ".join(text.split()))
    assert row is not None
    assert option is not None
    assert option[1] == row[1].strip("`")
