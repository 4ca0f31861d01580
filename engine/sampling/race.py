"""One token a row by a race, which a change of the weights in their last digits leaves as it was.

Id i arrives after E[i] / w[i], E exponential noise of its own; the first is i with probability w[i] / sum(w), exactly
(the minimum of exponentials; in logarithms the "Gumbel-max trick", C. J. Maddison, D. Tarlow, T. Minka, "A*
sampling", NIPS 2014). Another id comes first only where two arrive within the relative change of their weights: of
logits that move by 1e-5, as those of a prompt computed again do, at most some draws in 100,000. (The place of one
uniform number in a cumulative distribution is as fair, but all that lies before it moves its borders. Of 4,000 draws
out of 49,152 ids at temperature 1, logits moved by 1e-5 and by 1e-3, 53 and 329 fell the other way so, 0 and 7 here.)

An id is a number of three digits to base 64, the first as large as need be, and each digit has a race of its own by
the weight of all ids that begin so:

    block         0 |  1 | ...              sums of 4,096 ids
    bucket            '-- 0 | 1 | ... 63    of 64
    id                        '-- 0 ... 63

So a row needs some 200 numbers, not one an id, and all of them are known before any weight is. A digit's noise does
not depend on the digits before it: of those races one takes place.
"""

from __future__ import annotations

import torch

from engine.sampling import ranking
from engine.sampling.ranking import BUCKET


def noise_size(vocab_size: int) -> int:
    """How many numbers a row needs: of the last digit, the middle one and the first, one behind the other."""
    return 2 * BUCKET + -(-vocab_size // BUCKET**2)


def first_of_all(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Race all ids.

    Args:
        weights: floating point `[rows, vocab]`, none negative, some positive in each row.
        noise: float64 `[rows, noise_size(vocab)]`, exponential, neither 0 nor infinite.

    Returns:
        int64 `[rows]`. Ties by id.
    """
    buckets = ranking.bucket_sum(weights)
    of_ids, of_buckets, of_blocks = _digits(noise)
    block = _first(ranking.bucket_sum(buckets), of_blocks)
    bucket = _first_inside(block, buckets, of_buckets)
    return _first_inside(bucket, weights, of_ids).squeeze(-1)


def first_of(ids: torch.Tensor, weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Race some ids: the same winner as if all others had raced with weight 0.

    Args:
        ids: int64 `[rows, n]`, different in each row, in any order.
        weights: float64 `[rows, n]`, none negative, some positive in each row.
        noise: as above.

    Returns:
        int64 `[rows]`.
    """
    of_ids, of_buckets, of_blocks = _digits(noise)
    buckets = ids // BUCKET
    races = ((buckets // BUCKET, of_blocks), (buckets % BUCKET, of_buckets), (ids % BUCKET, of_ids))
    for digit, each in races:
        sums = torch.zeros_like(each).scatter_add_(1, digit, weights)
        weights = weights * (digit == _first(sums, each))
    return ids.gather(1, weights.argmax(dim=-1, keepdim=True)).squeeze(-1)  # one is left


def _digits(noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noise of the last digit, the middle one and the first."""
    return noise[:, :BUCKET], noise[:, BUCKET : 2 * BUCKET], noise[:, 2 * BUCKET :]


def _first(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Index of the winner, `[rows, 1]`. What has no weight arrives after infinite time."""
    return (noise / weights).argmin(dim=-1, keepdim=True)


def _first_inside(bucket: torch.Tensor, weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The winner inside a bucket (`[rows, 1]`) of the weights; its index among all, `[rows, 1]`."""
    ids = ranking.ids_in(bucket)
    last = weights.shape[1] - 1
    inside = weights.gather(1, ids.clamp(max=last)).masked_fill_(ids > last, 0.0)
    return ids.gather(1, _first(inside, noise))
