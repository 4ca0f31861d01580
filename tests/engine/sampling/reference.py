"""What a sampler should do, slowly and plainly: float64, one row, one id at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from engine.sampling import Draw, Logprobs, Problem, Rules, rules_for, sample
from protocol import SamplingParams

Row = list[float]


def ruled(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Collection[int] = (),
    bad_words: Sequence[tuple[int, ...]] = (),
    grammar: Collection[int] | None = None,
) -> Row:
    """Logits after all rules."""
    row = []
    for token_id, logit in enumerate(logits):
        x = float(logit) + params.logit_bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        if token_id in output:
            x -= params.frequency_penalty * list(output).count(token_id) + params.presence_penalty
        for *others, last in bad_words:
            if last == token_id and (not others or list(output)[-len(others) :] == others):
                x = -math.inf
        if token_id in end_ids and len(output) < params.min_tokens:
            x = -math.inf
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            x = -math.inf
        if grammar is not None and token_id not in grammar:
            x = -math.inf
        row.append(x)
    return row


def ranked(logits: Sequence[float]) -> list[int]:
    """Ids, the likelier first, ties by id."""
    return sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))


def kept(logits: Sequence[float], params: SamplingParams) -> tuple[dict[int, float], float]:
    """The ids that can be drawn, likeliest first, with their probabilities; and how near the closest call was."""
    best = max(logits)
    weights = {
        token_id: math.exp((logits[token_id] - best) / params.temperature) for token_id in ranked(logits)
    }
    if params.top_k > 0:
        weights = dict(list(weights.items())[: params.top_k])
    nearest, before, total, inside = math.inf, 0.0, sum(weights.values()), {}
    for token_id, weight in weights.items():
        if inside and params.top_p < 1:
            nearest = min(nearest, abs(before / total - params.top_p))
            if before / total >= params.top_p:
                break
        inside[token_id] = weight
        before += weight
    left = {}
    for token_id, weight in inside.items():
        if 0 < weight < 1 and params.min_p > 0:
            nearest = min(nearest, abs(math.log(weight / params.min_p)))
        if weight >= params.min_p and weight > 0:
            left[token_id] = weight
    mass = sum(left.values())
    return {token_id: weight / mass for token_id, weight in left.items()}, nearest


def chi_square(observed: list[int], probabilities: torch.Tensor) -> tuple[float, float]:
    """Pearson's statistic, and the value that a right sampler exceeds once in about 30,000 runs (Wilson-Hilferty)."""
    possible = probabilities > 0
    counts = torch.bincount(torch.tensor(observed), minlength=len(probabilities)).double()
    assert counts[~possible].sum() == 0
    counts, expected = counts[possible], probabilities[possible] * len(observed)
    freedom = len(expected) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 4.0 * (2 / (9 * freedom)) ** 0.5) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), limit


@dataclass
class Told:
    """What one row of `generate` came to."""

    token_ids: list[int]
    logprobs: list[Logprobs | None]
    problem: Problem | None = None


def generate(
    logits: Callable[[list[list[int]]], torch.Tensor],
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    steps: int,
) -> list[Told]:
    """Steps of a whole batch without an engine; a row with a problem goes on no further."""
    rows = [Told([], []) for _ in prompts]
    draws = [
        Draw(each, each.seed or 0, 0, 0, rules(each, prompt))
        for each, prompt in zip(params, prompts, strict=True)
    ]
    for _ in range(steps):
        live = [place for place, row in enumerate(rows) if row.problem is None]
        drawn = sample(
            logits([[*prompts[place], *rows[place].token_ids] for place in live]),
            [draws[place] for place in live],
        )
        for place, token_id, problem, told in zip(
            live, drawn.token_ids, drawn.problems, drawn.logprobs, strict=True
        ):
            rows[place].problem = problem
            if problem is None:
                rows[place].token_ids.append(token_id)
                rows[place].logprobs.append(told)
                draws[place].position += 1
                if draws[place].rules is not None:
                    draws[place].rules.push(token_id)
    return rows


def rules(params: SamplingParams, prompt: Sequence[int] = (), vocab_size: int = 512) -> Rules | None:
    """Rules that come from parameters alone."""
    return rules_for(params, prompt, vocab_size, end_ids=frozenset(), bad_words=(), matcher=None)
