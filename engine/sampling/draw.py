"""One token a row out of the distribution that temperature and filters leave.

Each row has one uniform number (see `philox`) and takes the token at that place of its cumulative distribution. No
generator has a state, so a row's token does not depend on its neighbours.

    kept      .50    .30    .15          top_k, then top_p of what top_k left, then min_p of what is likeliest
    cdf       0     .53    .84   1
    u = .61            ^ the second      the token that crosses top_p is kept

Two ways, chosen per row by its own parameters. With temperature alone no order is needed: the cdf runs over the
vocabulary by id. With a filter it runs over the best `CUTS[0]` tokens, exact where they hold all that is kept; the
other rows look at more, and at last at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling import ranking
from engine.sampling.philox import uniform
from engine.sampling.rules import Rules
from protocol import SamplingParams

CUTS = (64, 512, 8192)
"""151,936 ids, one core, ms a row: 0.2, 0.8, 2.6; all 40."""


@dataclass(slots=True)
class Draw:
    """What one row's draw depends on beside its logits."""

    params: SamplingParams
    seed: int
    choice: int
    position: int
    """How many tokens the choice has already."""
    rules: Rules | None = None


@dataclass(frozen=True, slots=True)
class _Filters:
    """What cuts the ranked tokens of each row, `[rows]` each."""

    top_k: torch.Tensor
    """int64; the vocabulary's size where nothing is to be cut."""
    top_p: torch.Tensor
    """float64."""
    min_x: torch.Tensor
    """float32: scaled logits below it are out."""
    total: torch.Tensor
    """float64: the vocabulary's weight, the likeliest token's being 1; only right where top_p and not top_k cuts."""
    place: torch.Tensor
    """float64: the uniform number."""

    def of(self, rows: torch.Tensor) -> _Filters:
        return _Filters(
            self.top_k[rows], self.top_p[rows], self.min_x[rows], self.total[rows], self.place[rows]
        )


def draw(logits: torch.Tensor, best: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Draw one token a row.

    Args:
        logits: floating point `[rows, vocab]`, no NaN and no +inf.
        best: `[rows]`, the largest of each row, finite.
        draws: one a row, each with a temperature above 0.

    Returns:
        int64 `[rows]`.
    """
    place = torch.from_numpy(
        uniform([d.seed for d in draws], [d.choice for d in draws], [d.position for d in draws])
    ).to(logits.device)
    temperature = _temperature(draws, logits.device)
    token_ids = torch.empty(len(draws), dtype=torch.long, device=logits.device)
    ranked = [_is_filtered(each.params) for each in draws]
    for way in (False, True):
        rows = [row for row, filtered in enumerate(ranked) if filtered is way]
        if not rows:
            continue
        x, at = ranking.take(logits, rows), torch.tensor(rows, device=logits.device)
        if way:
            params = [draws[row].params for row in rows]
            chosen = _by_rank(x, best[at], temperature[at], place[at], params)
        else:
            chosen = _by_id(_scaled(x, best[at], temperature[at]), place[at])
        token_ids[at] = chosen
    return token_ids


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _temperature(draws: Sequence[Draw], device: torch.device) -> torch.Tensor:
    """Float32 `[rows]`, within 1e-30 and 1e30: float32 has no smaller difference to magnify and no larger one to
    level, and beyond them 0 / 0 and inf / inf would appear."""
    held = [min(max(draw.params.temperature, 1e-30), 1e30) for draw in draws]
    return torch.tensor(held, dtype=torch.float32, device=device)


def _scaled(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logits - max) / temperature, float32. All of it is at most 0, so no temperature can overflow it."""
    return (logits.float() - best.float().unsqueeze(-1)).div_(temperature.unsqueeze(-1))


def _by_id(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Draw from the whole vocabulary in order of id: the bucket first, then the id in it."""
    buckets = ranking.bucket_sum(x.exp()).double().cumsum(dim=-1)
    target = place.unsqueeze(-1) * buckets[:, -1:]
    bucket = _first_above(buckets, target)
    after = buckets.gather(1, bucket)
    before = torch.where(bucket > 0, buckets.gather(1, (bucket - 1).clamp(min=0)), 0.0)
    ids = ranking.ids_in(bucket)
    weights = x.gather(1, ids.clamp(max=x.shape[1] - 1)).double().exp()
    cdf = torch.where(ids < x.shape[1], weights, 0.0).cumsum(dim=-1)
    share = (target - before) / (after - before)
    return ids.gather(1, _first_above(cdf, share * cdf[:, -1:])).squeeze(-1)


def _by_rank(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    place: torch.Tensor,
    params: Sequence[SamplingParams],
) -> torch.Tensor:
    """Draw from the likeliest tokens: look at the best few, and at more where those do not hold all that is kept."""
    vocab_size = logits.shape[1]
    filters = _filters(logits, best, temperature, place, params)
    least = torch.where(filters.top_k < vocab_size, filters.top_k, 1)
    token_ids = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    rest = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    for cut in (*CUTS, vocab_size):
        rows = (rest & (least <= cut)).nonzero().squeeze(-1)
        if not len(rows):
            continue
        # One more than the cut, to see a tie at its border.
        values, ids = ranking.largest(_some(logits, rows), min(cut + 1, vocab_size))
        x = _scaled(values, best[rows], temperature[rows])
        chosen, exact = _from_ranked(values, x, filters.of(rows), vocab_size)
        token_ids[rows] = ids.gather(1, chosen).squeeze(-1)
        rest[rows] = ~exact
    return token_ids


def _some(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x if len(rows) == len(x) else x.index_select(0, rows)


def _filters(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    place: torch.Tensor,
    params: Sequence[SamplingParams],
) -> _Filters:
    vocab_size, device = logits.shape[1], logits.device
    top_k = [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params]
    total = torch.zeros(len(params), dtype=torch.float64, device=device)
    whole = [row for row, k in enumerate(top_k) if k == vocab_size and params[row].top_p < 1]
    if whole:
        at = torch.tensor(whole, device=device)
        weights = _scaled(_some(logits, at), best[at], temperature[at]).exp_()
        total[at] = ranking.bucket_sum(weights).sum(dim=-1, dtype=torch.float64)
    return _Filters(
        top_k=torch.tensor(top_k, device=device),
        top_p=torch.tensor([each.top_p for each in params], dtype=torch.float64, device=device),
        min_x=torch.tensor(
            [math.log(each.min_p) if each.min_p > 0 else -math.inf for each in params], device=device
        ),
        total=total,
        place=place,
    )


def _from_ranked(
    values: torch.Tensor, x: torch.Tensor, filters: _Filters, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Filter ranked candidates and choose one.

    Args:
        values: `[rows, n]`, the n largest logits of each row.
        x: float32 `[rows, n]`, the same scaled.

    Returns:
        The place of the chosen one `[rows, 1]`, and for which rows it is exact: nothing that should be kept can lie
        beyond the n.
    """
    n = values.shape[1]
    top_k, top_p = filters.top_k.unsqueeze(-1), filters.top_p.unsqueeze(-1)
    weights = torch.where(torch.arange(n, device=x.device) < top_k, x.double().exp(), 0.0)
    cdf = weights.cumsum(dim=-1)
    mass = torch.where(top_k <= n, cdf[:, -1:], filters.total.unsqueeze(-1))  # top_p is a share of it
    kept = (
        ((cdf - weights < top_p * mass) | (top_p >= 1)) & (x >= filters.min_x.unsqueeze(-1)) & (weights > 0)
    )
    kept[:, 0] = True
    last = kept.sum(dim=-1, keepdim=True) - 1
    target = filters.place.unsqueeze(-1) * cdf.gather(1, last)
    chosen = torch.minimum(_first_above(cdf, target), last)
    # A tie with the last of the n may go on beyond it, and which of the tied ids the n hold would be chance.
    inside = (values.gather(1, last) > values[:, -1:]).squeeze(-1)
    return chosen, inside | (n == vocab_size)


def _first_above(cdf: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index `[rows, 1]` of the first entry above the target; if rounding leaves none, of the last with mass."""
    last = (cdf < cdf[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum((cdf <= target).sum(dim=-1, keepdim=True), last)
