"""A place in a cumulative distribution, and the token there."""

from __future__ import annotations

import torch

from engine.sampling import ranking


def scaled(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logits - best) / temperature, float32 `[rows, n]`: the logarithms of weights, the likeliest token's being 1.

    All of it is at most 0, so no temperature can overflow it.

    Args:
        logits: floating point `[rows, n]`.
        best: `[rows]`, the largest of each whole row.
        temperature: float32 `[rows]`, above 0.
    """
    return (logits.float() - best.float().unsqueeze(-1)).div_(temperature.unsqueeze(-1))


def by_id(weights: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The token at a place of the distribution that runs over the vocabulary by id: its bucket first, then the id.

    Args:
        weights: float32 `[rows, vocab]`, none negative, some positive in each row.
        place: float64 `[rows]` in [0, 1).

    Returns:
        int64 `[rows]`.
    """
    buckets = ranking.bucket_sum(weights).double().cumsum(dim=-1)
    target = place.unsqueeze(-1) * buckets[:, -1:]
    bucket = first_above(buckets, target)
    after = buckets.gather(1, bucket)
    before = torch.where(bucket > 0, buckets.gather(1, (bucket - 1).clamp(min=0)), 0.0)
    ids = ranking.ids_in(bucket)
    inside = weights.gather(1, ids.clamp(max=weights.shape[1] - 1)).double()
    cdf = torch.where(ids < weights.shape[1], inside, 0.0).cumsum(dim=-1)
    share = (target - before) / (after - before)
    return ids.gather(1, first_above(cdf, share * cdf[:, -1:])).squeeze(-1)


def first_above(cdf: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index `[rows, 1]` of the first entry above the target; if rounding leaves none, of the last with mass."""
    last = (cdf < cdf[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum((cdf <= target).sum(dim=-1, keepdim=True), last)
