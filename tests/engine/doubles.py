"""Stand-ins for the model half.

`PagedDouble` is a forward pass without arithmetic: it writes token ids where a real one writes keys and values, reads
the whole sequence back through the block table, and asks a function for the logits that follow. A block given to two
sequences, a table that is too short or a position that is off by one therefore changes the answer.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine.engine import Engine
from engine.interface import Chunk, Delta, Request, Written
from protocol import Fingerprint, Job, SamplingParams

Logits = Callable[[list[list[int]]], torch.Tensor]
"""From whole sequences to the logits after each, `[sequences, vocab]`."""
FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES = Path(__file__).parent / "cases"
VOCAB = 512


@dataclass(frozen=True)
class Step:
    """What one forward pass was asked for."""

    sizes: list[int]
    """Tokens of each chunk."""
    decodes: int
    """Chunks of one token at the end of their sequence."""


class PagedDouble:
    """Implements `engine.interface.Runner`."""

    is_asynchronous = False
    num_padding_rows = 0
    num_replays = 0

    def __init__(
        self,
        logits: Logits,
        vocab_size: int = VOCAB,
        max_model_len: int = 256,
        block_size: int = 8,
        num_kv_blocks: int = 64,
    ) -> None:
        self._logits = logits
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.num_kv_blocks = num_kv_blocks
        self._store: list[int | None] = [None] * (num_kv_blocks * block_size)
        self.steps: list[Step] = []
        self.before_forward: Callable[[], None] = lambda: None

    def forward(self, chunks: Sequence[Chunk], drawn: torch.Tensor | None = None) -> torch.Tensor:
        self.before_forward()
        decodes = sum(len(chunk.token_ids) == 1 and chunk.num_logits == 1 for chunk in chunks)
        self.steps.append(Step([len(chunk.token_ids) for chunk in chunks], decodes))
        for chunk in chunks:
            for offset, token_id in enumerate(_known(chunk, drawn)):
                self._store[self._slot(chunk, chunk.start + offset)] = token_id
        sequences = [
            tokens[: len(tokens) - left]
            for chunk in chunks
            for tokens in [self._read(chunk)]
            for left in reversed(range(chunk.num_logits))
        ]
        return self._logits(sequences) if sequences else torch.empty(0, self.vocab_size)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        size = self.block_size
        for source, target in pairs:
            self._store[target * size : (target + 1) * size] = self._store[
                source * size : (source + 1) * size
            ]

    def _slot(self, chunk: Chunk, position: int) -> int:
        return chunk.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, chunk: Chunk) -> list[int]:
        length = chunk.start + len(chunk.token_ids)
        tokens = [self._store[self._slot(chunk, position)] for position in range(length)]
        assert None not in tokens, "read before written"
        return [token for token in tokens if token is not None]


def _known(chunk: Chunk, drawn: torch.Tensor | None) -> list[int]:
    """The chunk's tokens, the last from what the step before has drawn if the engine has not read it."""
    if chunk.follows is None:
        return list(chunk.token_ids)
    assert drawn is not None
    assert chunk.token_ids[-1] == 0, "a token that nobody can know yet"
    return [*chunk.token_ids[:-1], int(drawn[chunk.follows])]


class TokenIds:
    """Implements `engine.interface.PromptEncoder` for prompts that are token ids already."""

    def encode(self, job: Job) -> list[list[int]]:
        return [[token_id for token_id in prompt if isinstance(token_id, int)] for prompt in job.prompts]

    def words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        return [tuple(map(ord, word)) for word in words]


def make_engine(
    runner: PagedDouble, tokenizer: Any = None, eos: Sequence[int] = (2,), **options: Any
) -> Engine:
    return Engine(runner, tokenizer, TokenIds(), Fingerprint(name="double"), eos, **options)


def optimistic(engine: Engine) -> Engine:
    """The engine, made to admit whatever fits now: sequences then outgrow the pool and are preempted."""
    engine._scheduler.forecast.fits = lambda *_: True  # type: ignore[method-assign]
    return engine


def request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    priority: int = 1,
    seed: int = 0,
    **params: Any,
) -> Request:
    params = {"temperature": 0.0, "ignore_eos": True, **params}
    return Request(request_id, (tuple(prompt),), SamplingParams(**params), seed, (max_tokens,), priority)


def resumed(new: Request, *logged: Sequence[int] | Written) -> Request:
    """A request that an earlier attempt has begun: of each choice the ids that are logged."""
    written = [one if isinstance(one, Written) else Written(tuple(one)) for one in logged]
    return replace(new, written=tuple(written))


def hashed(sequences: list[list[int]]) -> torch.Tensor:
    """A model whose next token depends on every token before it and on where each stands. Never 0, 1 or 2."""
    logits = torch.zeros(len(sequences), VOCAB)
    for row, tokens in enumerate(sequences):
        state = 0
        for token_id in tokens:
            state = (state * 31 + token_id + 1) % 1_000_003
        logits[row, 3 + state % (VOCAB - 3)] = 10.0
    return logits


Output = dict[str, list[Delta]]


def run(engine: Engine, requests: Iterable[Request] = ()) -> Output:
    """All deltas of each request, once nothing is left to do."""
    for new in requests:
        engine.add(new)
    deltas: Output = defaultdict(list)
    for _ in range(5000):
        if not engine.has_work():
            return deltas
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
        engine.check_integrity()
    raise AssertionError("no end")


def token_ids(deltas: list[Delta]) -> list[int]:
    """The ids of a request with one choice that ended once, with its last delta."""
    ends = [delta.finish_reason is not None or delta.error is not None for delta in deltas]
    assert ends == [delta.last for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return [token_id for delta in deltas for token_id in delta.token_ids]


def choices(deltas: list[Delta]) -> dict[int, list[int]]:
    """The ids of each choice of a request, each of which ended once."""
    assert [delta.last for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    out: dict[int, list[int]] = defaultdict(list)
    ended = set()
    for delta in deltas:
        assert delta.choice not in ended
        out[delta.choice] += delta.token_ids
        if delta.finish_reason is not None:
            ended.add(delta.choice)
    assert ended == set(out)
    return dict(out)


def alone(new: Request) -> list[int]:
    """What a request gives by itself in a roomy engine."""
    return token_ids(run(make_engine(PagedDouble(hashed, num_kv_blocks=100)), [new])[new.id])


def assert_empty(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert not engine._loop.roster
    assert not engine._ended
    engine.check_integrity()


def scripted(scripts: dict[int, list[int]], vocab_size: int) -> Logits:
    """A model that follows a script: the one of its prompt's only token."""

    def logits(sequences: list[list[int]]) -> torch.Tensor:
        out = torch.zeros(len(sequences), vocab_size)
        for row, tokens in enumerate(sequences):
            out[row, scripts[tokens[0]][len(tokens) - 1]] = 10.0
        return out

    return logits


def case(name: str) -> Any:
    """The input of a case from `cases/`."""
    return json.loads((CASES / f"{name}.json").read_text())["input"]


@cache
def tiny_references() -> list[dict[str, list[int]]]:
    """Prompts of the tiny model with the ids that transformers' `generate` gives."""
    requests: list[dict[str, list[int]]] = json.loads((FIXTURES / "tiny_model.json").read_text())["requests"]
    return requests


@cache
def tiny() -> Logits:
    """The tiny model of `fixtures/tiny_model.json`, computed from the beginning at every step, without any KV."""
    from transformers import LlamaConfig, LlamaForCausalLM

    recipe = json.loads((FIXTURES / "tiny_model.json").read_text())
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**recipe["config"])).eval().float()
    total = sum(parameter.abs().sum().item() for parameter in model.parameters())
    assert abs(total - recipe["checksum_sum_abs_params_torch_2_13_cpu"]) < 0.5, "another random generator"

    @torch.inference_mode()
    def logits(sequences: list[list[int]]) -> torch.Tensor:
        longest = max(map(len, sequences))
        padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in sequences])
        every = model(
            padded, use_cache=False
        ).logits  # causal: padding on the right changes nothing before it
        last = every[torch.arange(len(sequences)), torch.tensor([len(tokens) - 1 for tokens in sequences])]
        last[:, recipe["config"]["eos_token_id"]] = -torch.inf  # as the references were made
        return last

    return logits
