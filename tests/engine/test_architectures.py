"""Every architecture of the table gives the tokens of transformers' `generate`, in four arrangements (fp32)."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.engine import Engine
from engine.loading import load_runner
from engine.model_runner import ModelRunner
from protocol import Fingerprint, ModelUnavailable
from tests.architectures import ARRANGEMENTS, BASE, VERIFIED, WINDOW, Architecture
from tests.engine.doubles import TokenIds, optimistic, request
from tests.models import save_tiny
from tests.models_page import page
from tests.refused_architectures import REFUSED, Refused

QUICK = ("deepseek_v3", "gemma2", "gpt2", "gpt_oss")
NEW_TOKENS = 12
BLOCK_SIZE = 8
WHOLE_BLOCKS = 5
"""Blocks that three of the prompts begin with alike."""
CLOSEST = 3e-4
"""Between the two best logits; batches differ from a lone row by about 2e-5."""


def _prompts() -> dict[str, list[int]]:
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, BASE["vocab_size"]) for _ in range(count)]

    alike = ids(WHOLE_BLOCKS * BLOCK_SIZE)
    prompts = [ids(count) for count in (1, 2, 5, 8, 9, 12, 17, 23, 31)]
    prompts += [alike + ids(count) for count in (1, 13, 20)]
    return {f"{len(prompt)} tokens": prompt for prompt in prompts}


PROMPTS = _prompts()


@dataclass
class Tiny:
    """A tiny model, and what `generate` gives for each prompt alone."""

    runner: ModelRunner
    expected: dict[str, list[int]]

    def engine(self, num_kv_blocks: int | None = None, **limits: int) -> Engine:
        """A new engine on the one runner, its KV forgotten."""
        runner = copy.copy(self.runner)
        runner.num_kv_blocks = num_kv_blocks or runner.num_kv_blocks
        return Engine(runner, None, TokenIds(), Fingerprint(name="tiny"), (2,), **limits)


def references(folder: Path, class_name: str) -> dict[str, list[int]]:
    """transformers' own loop: eager attention, its own cache, one prompt at a time."""
    model = getattr(transformers, class_name).from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    # Without an end token, and without what an architecture's own generation config may add.
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    found = {}
    for name, prompt in PROMPTS.items():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2).values
        margin = float((best[:, 0] - best[:, 1]).min())
        assert margin > CLOSEST, f"{margin:.1e} between the best two: give the architecture another seed"
        found[name] = out.sequences[0, len(prompt) :].tolist()
    assert len({tuple(ids) for ids in found.values()}) == len(PROMPTS)
    return found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(one, id=one.model_type, marks=[] if one.model_type in QUICK else pytest.mark.long)
        for one in VERIFIED
    ],
)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    one: Architecture = request.param
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = save_tiny(
        getattr(transformers, one.class_name),
        tmp_path_factory.mktemp("tiny"),
        {**BASE, **one.config},
        seed=one.seed,
    )
    expected = references(folder, one.class_name)
    loaded = load_runner(str(folder), dtype="float32", device="cpu", block_size=BLOCK_SIZE, num_kv_blocks=128)
    windows = {getattr(module, "attention_window", None) for module in loaded.weights.model.modules()} - {
        None
    }
    assert all(window <= WINDOW for window in windows)
    assert bool(windows) == ("window" in one.special), "the page says so, and the tiny model must have it"
    yield Tiny(loaded.runner, expected)
    torch.set_num_threads(threads)


def answer(engine: Engine, names: Any = tuple(PROMPTS)) -> dict[str, list[int]]:
    """The ids of every prompt, all of them queued before the first step."""
    out: dict[str, list[int]] = {name: [] for name in names}
    for name in names:
        engine.add(request(name, PROMPTS[name], NEW_TOKENS))
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None
            out[delta.request_id] += delta.token_ids
    return out


def test_batch(tiny: Tiny) -> None:
    assert answer(tiny.engine()) == tiny.expected


def test_chunks(tiny: Tiny) -> None:
    engine = tiny.engine(max_num_batched_tokens=7)
    assert answer(engine) == tiny.expected
    assert engine.stats().steps > sum(map(len, PROMPTS.values())) // 7


def test_prefix(tiny: Tiny) -> None:
    engine = tiny.engine()
    first, *others = [name for name, ids in PROMPTS.items() if len(ids) > WHOLE_BLOCKS * BLOCK_SIZE]
    assert answer(engine, [first]) == {first: tiny.expected[first]}
    assert engine.stats().cached_tokens == 0
    assert answer(engine, others) == {name: tiny.expected[name] for name in others}
    assert engine.stats().cached_tokens == len(others) * WHOLE_BLOCKS * BLOCK_SIZE
    assert answer(engine) == tiny.expected
    again = sum((len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE for ids in PROMPTS.values())
    assert engine.stats().cached_tokens > again // 2


def test_preempted(tiny: Tiny) -> None:
    engine = optimistic(tiny.engine(num_kv_blocks=14))
    assert answer(engine) == tiny.expected
    assert engine.stats().preemptions > 0


def test_the_page_says_what_is_tested() -> None:
    assert all(f"test_{name}" in globals() for name in ARRANGEMENTS)
    assert (Path(__file__).parents[2] / "docs" / "models.md").read_text() == page(), (
        "out of date: python -m tests.models_page > docs/models.md"
    )


@pytest.mark.parametrize(
    "refused",
    [
        pytest.param(
            one, id=one.model_type, marks=[] if one.model_type == "llama4_text" else pytest.mark.long
        )
        for one in REFUSED
    ],
)
def test_what_cannot_be_right_is_refused(tmp_path: Path, refused: Refused) -> None:
    folder = save_tiny(getattr(transformers, refused.class_name), tmp_path, {**BASE, **refused.config})
    with pytest.raises(ModelUnavailable, match=refused.said) as caught:
        load_runner(str(folder), dtype="float32", device="cpu")
    assert "\n" not in str(caught.value)
