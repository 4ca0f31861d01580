"""One token a row for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from engine.sampling import logprobs as told
from engine.sampling import ranking
from engine.sampling.adjust import apply
from engine.sampling.draw import Draw, draw
from engine.sampling.logprobs import Logprobs
from protocol import RequestError

Problem = Literal["invalid_logits", "no_candidates"] | RequestError
"""Why no token can be drawn: logits with NaN or +inf, or nothing but -inf; rules that left nothing; or what the row's
grammar raised."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was drawn, one entry a row each."""

    token_ids: list[int]
    """Some id of the vocabulary where there is a problem."""
    problems: list[Problem | None]
    logprobs: list[Logprobs | None]
    """Where asked for and there is no problem."""


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> Sampled:
    """Choose one token a row. A row's token depends on its own logits and its own draw, on nothing else.

    Args:
        logits: floating point `[rows, vocab]`, on any device; left as they are.
        draws: one a row.
    """
    best, token_ids = ranking.argmax(logits)
    problems: list[Problem | None] = [None if fine else "invalid_logits" for fine in best.isfinite().tolist()]
    usable = [row for row, problem in enumerate(problems) if problem is None]
    ruled = [row for row in usable if draws[row].rules is not None]
    drawn = [row for row in usable if draws[row].rules is None and draws[row].params.temperature > 0]
    for rows in ranking.chunks(drawn, logits):
        at = torch.tensor(rows, device=logits.device)
        token_ids[at] = draw(ranking.take(logits, rows), best[at], [draws[row] for row in rows])
    for rows in ranking.chunks(ruled, logits):
        at = torch.tensor(rows, device=logits.device)
        x = logits.index_select(0, at).float()
        token_ids[at], found = _sample_ruled(x, [draws[row] for row in rows])
        for row, problem in zip(rows, found, strict=True):
            problems[row] = problem
    chosen = token_ids.tolist()
    return Sampled(chosen, problems, _logprobs(logits, draws, chosen, problems))


def _sample_ruled(x: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, list[Problem | None]]:
    """The same for rows with rules, whose logits (float32, valid) may be written over."""
    failures = apply(x, [each.rules for each in draws if each.rules is not None])
    best, token_ids = ranking.argmax(x)
    problems: list[Problem | None] = [
        failure or (None if some else "no_candidates")
        for failure, some in zip(failures, best.isfinite().tolist(), strict=True)
    ]
    rows = [row for row, each in enumerate(draws) if problems[row] is None and each.params.temperature > 0]
    if rows:
        at = torch.tensor(rows, device=x.device)
        token_ids[at] = draw(ranking.take(x, rows), best[at], [draws[row] for row in rows])
    return token_ids, problems


def _logprobs(
    logits: torch.Tensor, draws: Sequence[Draw], token_ids: Sequence[int], problems: Sequence[Problem | None]
) -> list[Logprobs | None]:
    asked = {
        row: each.params.num_logprobs
        for row, each in enumerate(draws)
        if each.params.num_logprobs is not None and problems[row] is None
    }
    rows = list(asked)
    found = told.of_rows(logits, rows, [token_ids[row] for row in rows], list(asked.values()))
    by_row = dict(zip(rows, found, strict=True))
    return [by_row.get(row) for row in range(len(draws))]
