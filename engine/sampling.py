"""From logits to tokens.

Each row has one uniform number (see `engine.philox`) and takes the token at that place of its cumulative
distribution. No generator has a state, so a row's token does not depend on its neighbours.

    kept      .50    .30    .15          after temperature, top_k, then top_p on what top_k left
    cdf       0     .53    .84   1
    u = .61            ^ the second      the token that crosses top_p is kept

Two ways, chosen per row by its own parameters. With temperature alone no order is needed: the cdf runs over the
vocabulary by id. With top_k or top_p it runs over the best `CUTS[0]` tokens, exact where they hold all that is kept;
the other rows look at more, and at last at all. (151,936 ids, one core, ms a row: best 256 0.6, best 8,192 2.6, full
sort 40.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.philox import uniform
from protocol import SamplingParams

CUTS = (256, 8192)
_BUCKET = 64
"""Vocabulary sizes are multiples of 64 as a rule; others are padded."""
_CHUNK = 1 << 20
"""Logits worked on at once on a CPU: larger temporaries are fresh pages each time (26 against 38 ms)."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row's draw depends on beside its logits."""

    params: SamplingParams
    seed: int
    choice: int
    position: int
    """How many tokens the choice has already."""


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[bool]]:
    """Choose one token a row.

    Args:
        logits: floating point `[rows, vocab]`.
        draws: one a row.

    Returns:
        A token id per row, and whether it can be used: a row with NaN or +inf among its logits, or with nothing
        but -inf, cannot, and does not disturb the others.
    """
    best, token_ids = _argmax(logits)
    usable = best.isfinite()  # NaN wins any comparison here, so the maximum tells a bad row
    drawn = [row for row, draw in enumerate(draws) if draw.params.temperature > 0]
    at_once = max(1, _CHUNK // logits.shape[1]) if logits.device.type == "cpu" else len(drawn)
    for start in range(0, len(drawn), at_once):
        rows = drawn[start : start + at_once]
        chosen = [draws[row] for row in rows]
        token_ids[rows] = _draw(_scale(logits[rows], best[rows], chosen), chosen)
    return token_ids.tolist(), usable.tolist()


def _argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row and its first index.

    In two levels: `max(dim=-1)` keeps an index per element and is not vectorised (11 ms for 32 rows of 151,936
    against 2 for `amax` over buckets and a search in one of them).
    """
    if logits.shape[1] % _BUCKET:
        best, token_ids = logits.max(dim=-1)
        return best, token_ids
    buckets = logits.view(len(logits), -1, _BUCKET)
    best, bucket = buckets.amax(dim=-1).max(dim=-1)
    inside = buckets[torch.arange(len(logits), device=logits.device), bucket].argmax(dim=-1)
    return best, bucket * _BUCKET + inside


def _scale(logits: torch.Tensor, best: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """(logits - max) / temperature, float32. All of it is at most 0, so no temperature can overflow it.

    Temperatures are held within 1e-30 and 1e30: float32 has no smaller difference to magnify and no larger one to
    level, and beyond them 0 / 0 and inf / inf would appear.
    """
    temperature = torch.tensor(
        [min(max(draw.params.temperature, 1e-30), 1e30) for draw in draws],
        dtype=torch.float32,
        device=logits.device,
    )
    return (logits.float() - best.float().unsqueeze(-1)).div_(temperature.unsqueeze(-1))


def _draw(x: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Token ids `[rows]` for scaled logits `[rows, vocab]`."""
    u = uniform([d.seed for d in draws], [d.choice for d in draws], [d.position for d in draws])
    columns = torch.tensor(
        [[_limit(draw.params.top_k, x.shape[1]), draw.params.top_p] for draw in draws],
        dtype=torch.float64,
        device=x.device,
    )
    top_k, top_p = columns.unbind(dim=1)
    place = torch.from_numpy(u).to(x.device)
    token_ids = torch.empty(len(draws), dtype=torch.long, device=x.device)
    filtered = (top_k < x.shape[1]) | (top_p < 1)
    plain, ranked = (~filtered).nonzero().squeeze(-1), filtered.nonzero().squeeze(-1)
    if len(plain):
        token_ids[plain] = _by_id(_rows(x, plain), place[plain])
    if len(ranked):
        token_ids[ranked] = _by_rank(_rows(x, ranked), top_k[ranked], top_p[ranked], place[ranked])
    return token_ids


def _limit(top_k: int, vocab_size: int) -> int:
    return top_k if 0 < top_k < vocab_size else vocab_size


def _rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x if len(rows) == len(x) else x[rows]


def _bucket_cdf(x: torch.Tensor) -> torch.Tensor:
    """exp(x) in buckets of 64 ids, cumulated: float64 `[rows, buckets]`."""
    weights = torch.nn.functional.pad(x.exp(), (0, -x.shape[1] % _BUCKET))
    return weights.view(len(x), -1, _BUCKET).sum(dim=-1).double().cumsum(dim=-1)


def _by_id(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Draw from the whole vocabulary in order of id: the bucket first, then the id in it."""
    buckets = _bucket_cdf(x)
    target = place.unsqueeze(-1) * buckets[:, -1:]
    bucket = _first_above(buckets, target)
    after = buckets.gather(1, bucket)
    before = torch.where(bucket > 0, buckets.gather(1, (bucket - 1).clamp(min=0)), 0.0)
    ids = bucket * _BUCKET + torch.arange(_BUCKET, device=x.device)
    weights = x.gather(1, ids.clamp(max=x.shape[1] - 1)).double().exp()
    cdf = torch.where(ids < x.shape[1], weights, 0.0).cumsum(dim=-1)
    share = (target - before) / (after - before)
    return (bucket * _BUCKET + _first_above(cdf, share * cdf[:, -1:])).squeeze(-1)


def _by_rank(x: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Draw from the likeliest tokens: look at the best few, and at more where those do not hold all that is kept."""
    vocab_size = x.shape[1]
    total = _bucket_cdf(x)[:, -1] if bool((top_p < 1).any()) else torch.zeros_like(top_p)
    token_ids = torch.empty(len(x), dtype=torch.long, device=x.device)
    rest = torch.arange(len(x), device=x.device)
    for cut in (*CUTS, vocab_size):
        count = min(cut + 1, vocab_size)  # one more than the cut, to see a tie at its border
        values, ids = _best(_rows(x, rest), count)
        chosen, exact = _from_ranked(
            values, ids, vocab_size, total[rest], top_k[rest], top_p[rest], place[rest]
        )
        token_ids[rest] = chosen
        rest = rest[~exact]
        if not len(rest):
            break
    return token_ids


def _best(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row and their ids, the larger first, ties by id, the smaller first."""
    if count == x.shape[1]:
        return torch.sort(x, dim=-1, descending=True, stable=True)
    values, ids = x.topk(count, dim=-1)
    by_id = ids.argsort(dim=-1)
    values, ranks = torch.sort(values.gather(1, by_id), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, by_id).gather(1, ranks)


def _from_ranked(
    values: torch.Tensor,
    ids: torch.Tensor,
    vocab_size: int,
    total: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    place: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Filter ranked candidates `[rows, n]` and draw one.

    Returns:
        Token ids `[rows]`, and for which rows they are exact: nothing that should be kept can lie beyond the n.
    """
    n = values.shape[1]
    rank = torch.arange(n, device=values.device)
    weights = torch.where(rank < top_k.unsqueeze(-1), values.double().exp(), 0.0)
    cdf = weights.cumsum(dim=-1)
    mass = torch.where(top_k <= n, cdf[:, -1], total)  # what top_k leaves, for top_p to be a share of
    kept = (cdf - weights < (top_p * mass).unsqueeze(-1)) | (top_p >= 1).unsqueeze(-1)
    kept &= weights > 0
    kept[:, 0] = True
    last = kept.sum(dim=-1, keepdim=True) - 1
    target = place.unsqueeze(-1) * cdf.gather(1, last)
    chosen = torch.minimum(_first_above(cdf, target), last)
    # A tie with the last of the n may go on beyond it, and which of the tied ids the n hold would be chance.
    inside = values.gather(1, last).squeeze(-1) > values[:, -1]
    exact = (inside & ((top_k <= n) | (top_k == vocab_size))) | (n == vocab_size)
    return ids.gather(1, chosen).squeeze(-1), exact


def _first_above(cdf: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index `[rows, 1]` of the first entry above the target; if rounding leaves none, of the last with mass."""
    last = (cdf < cdf[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum((cdf <= target).sum(dim=-1, keepdim=True), last)
