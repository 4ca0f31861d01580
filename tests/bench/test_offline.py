"""The comparison of engines: its workload, and its table where an engine is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from bench import engines, offline, workload
from bench.engines import Engine
from engine.gguf_cache import converted
from tests.models import save_tiny, tiny_config


@pytest.mark.model
def test_the_workload_is_the_published_one(smollm2_path: Path) -> None:
    rows = workload.load(AutoTokenizer.from_pretrained(converted(smollm2_path)[0]))
    prompts, outputs = [len(row.prompt_ids) for row in rows], [row.max_tokens for row in rows]
    assert (len(rows), sum(prompts), min(prompts), max(prompts)) == (128, 11_648, 54, 158)
    assert (sum(outputs), min(outputs), max(outputs)) == (15_331, 47, 370)


def test_what_is_not_installed_is_listed(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Engine("no_such_engine_is_installed", engines.ENGINES["vllm"].load)
    monkeypatch.setitem(engines.ENGINES, "vllm", missing)
    monkeypatch.setattr(sys, "argv", ["offline", "--engine", "vllm", "--model", str(tiny_model_dir)])
    assert offline.main() == 0
    assert "not installed" in capsys.readouterr().out


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "millstream",
        *(pytest.param(f"transformers-{kind}", marks=pytest.mark.long) for kind in ("static", "cb")),
    ],
)
def test_an_engine_gives_what_was_asked_for(tmp_path: Path, name: str) -> None:
    folder = save_tiny(LlamaForCausalLM, tmp_path, tiny_config(max_position_embeddings=2048))
    asked = workload.load(AutoTokenizer.from_pretrained(folder), 2)
    measured = engines.measure(name, folder, rows=2, dtype="float32")
    assert measured.output_tokens == sum(row.max_tokens for row in asked) > 200
    assert measured.seconds > 0


def test_an_engine_that_gives_less_is_no_measurement(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = Engine("engine", lambda *_: (lambda _: 0, "lazy"))
    monkeypatch.setitem(engines.ENGINES, "millstream", lazy)
    with pytest.raises(SystemExit, match="gave 0 tokens"):
        engines.measure("millstream", tiny_model_dir, rows=2, dtype="float32")
