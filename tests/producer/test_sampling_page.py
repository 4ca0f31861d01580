"""docs/sampling.md says what the models say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from producer import ranges
from producer.bulk import openai
from producer.bulk.records import ANSWER_COLUMNS
from producer.request import RENDERING, build_job
from protocol import Job, RequestError, SamplingParams, TokenLogprob, TopLogprob
from protocol.job import MAX_CHOICES

PAGE = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the table under a heading, by the name in their first cell."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_every_parameter_stands_in_the_table_with_its_default_and_range() -> None:
    rows = table("Sampling parameters")
    assert rows.keys() == SamplingParams.model_fields.keys()
    defaults = json.loads(SamplingParams().model_dump_json())
    for name, (default, allowed, *cells) in rows.items():
        assert json.loads(default) == defaults[name], name
        assert allowed == ranges.allowed(name), name
        assert len(cells) == 4, name
        assert all(cells), name


def test_every_prompt_field_stands_in_the_table_with_its_default() -> None:
    rows = table("Prompts")
    assert rows.keys() == RENDERING | {"prompt", "messages"}
    for name, (default, *cells) in rows.items():
        assert json.loads(default) == Job.model_fields[name].default, name
        assert len(cells) == 4, name
        assert all(cells), name


def test_the_rest_is_as_it_says() -> None:
    said = re.search(r"^(top_p: .*)$", PAGE, re.MULTILINE)
    assert said is not None
    with pytest.raises(RequestError) as caught:
        build_job("x", None, None, {"top_p": 1.5}, None)
    assert str(caught.value) == said[1]
    bodies = PAGE.partition("\n## Bodies")[2].partition("\n## ")[0]
    for name in openai.IDLE | openai.ONLY.keys():
        assert f"`{name}`" in bodies, name
    comes_back = PAGE.partition("\n## What comes back")[2]
    for name in {*ANSWER_COLUMNS, *TokenLogprob.__annotations__, *TopLogprob.__annotations__}:
        assert f"`{name}`" in comes_back or f'"{name}"' in comes_back, name
    assert f"{MAX_CHOICES:,} choices a job" in PAGE
    for kind in ("json_object", "json_schema", "regex", "choice", "grammar"):
        assert f'{{"type": "{kind}"' in PAGE.partition("\n## Structured output")[2], kind
