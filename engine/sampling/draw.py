"""One token a row out of the distribution that temperature and filters leave.

Each row has one uniform number (see `philox`) and takes the token at that place of its cumulative distribution. No
generator has a state, so a row's token does not depend on its neighbours. With temperature alone no order is needed:
the cdf runs over the vocabulary by id. Rows with filters see `filters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling.distribution import by_id
from engine.sampling.filters import Rows, draw_filtered, is_filtered
from engine.sampling.philox import uniform
from engine.sampling.rules import Rules
from engine.sampling.transfer import sent
from protocol import SamplingParams


@dataclass(slots=True)
class Draw:
    """What one row's draw depends on beside its logits."""

    params: SamplingParams
    seed: int
    choice: int
    position: int
    """How many tokens the choice has already."""
    rules: Rules | None = None


def draw(logits: torch.Tensor, best: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Draw one token a row.

    Args:
        logits: floating point `[rows, vocab]`, no NaN and no +inf.
        best: `[rows]`, the largest of each row, finite.
        draws: one a row, each with a temperature above 0.

    Returns:
        int64 `[rows]`.
    """
    place = uniform([d.seed for d in draws], [d.choice for d in draws], [d.position for d in draws])
    rows = Rows(logits, best, _temperature(draws, logits.device), sent(place, logits.device))
    token_ids = torch.empty(len(draws), dtype=torch.long, device=logits.device)
    filtered = [row for row, each in enumerate(draws) if is_filtered(each.params)]
    if filtered:
        at = sent(filtered, logits.device)
        token_ids[at] = draw_filtered(rows.of(at), [draws[row].params for row in filtered])
    plain = sorted(set(range(len(draws))) - set(filtered))
    if plain:
        at = sent(plain, logits.device)
        some = rows.of(at)
        token_ids[at] = by_id(some.scaled().exp_(), some.place)
    return token_ids


def _temperature(draws: Sequence[Draw], device: torch.device) -> torch.Tensor:
    """Float32 `[rows]`, within 1e-30 and 1e30: float32 has no smaller difference to magnify and no larger one to
    level, and beyond them 0 / 0 and inf / inf would appear."""
    held = [min(max(draw.params.temperature, 1e-30), 1e30) for draw in draws]
    return sent(held, device, torch.float32)
