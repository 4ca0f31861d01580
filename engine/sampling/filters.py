"""Draws from what top_k, top_p and min_p keep.

    weights   .50    .30    .15    .04   ...   top_k, then top_p of what top_k left, then min_p of what is likeliest
    kept      .50    .30    .15     0          the token that crosses top_p is kept

The best `CUTS[0]` tokens are ranked, which is exact where they hold all that is kept; other rows rank more. Where
that is not enough either, what is kept is found without an order. The race is the same in all cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling import ranking
from engine.sampling.head import head
from engine.sampling.race import first_of, first_of_all
from engine.sampling.transfer import sent
from protocol import SamplingParams

CUTS = (64, 512)
"""151,936 ids, one core, ms a row: 0.3 and 1; without an order 8, all of them ranked 21."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows and what their draws depend on."""

    logits: torch.Tensor
    """Floating point `[rows, vocab]`."""
    best: torch.Tensor
    """`[rows]`, the largest of each."""
    temperature: torch.Tensor
    """Float32 `[rows]`."""
    noise: torch.Tensor
    """Float64 `[rows, noise_size(vocab)]`: see `race`."""

    def of(self, rows: torch.Tensor) -> Rows:
        logits = self.logits if len(rows) == len(self.logits) else self.logits.index_select(0, rows)
        return Rows(logits, self.best[rows], self.temperature[rows], self.noise[rows])

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """(logits - best) / temperature, float32: the logarithms of weights, the likeliest token's being 1.

        All of it is at most 0, so no temperature can overflow it.

        Args:
            logits: `[rows, n]`, all of them or some.
        """
        return (logits.float() - self.best.float().unsqueeze(-1)).div_(self.temperature.unsqueeze(-1))

    def weights(self) -> torch.Tensor:
        """Float32 `[rows, vocab]`, the likeliest token's 1."""
        return self.scaled(self.logits).exp_()


@dataclass(frozen=True, slots=True)
class Filters:
    """What cuts each row, `[rows, 1]` each."""

    top_k: torch.Tensor
    """int64; the vocabulary's size where nothing is to be cut."""
    top_p: torch.Tensor
    """float64; infinite where nothing is to be cut."""
    min_x: torch.Tensor
    """float32: scaled logits below it are out."""

    def of(self, rows: torch.Tensor) -> Filters:
        return Filters(self.top_k[rows], self.top_p[rows], self.min_x[rows])


def is_filtered(params: SamplingParams) -> bool:
    """Whether anything is to be cut."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def draw_filtered(rows: Rows, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Draw one token a row.

    Returns:
        int64 `[rows]`.
    """
    vocab_size, device = rows.logits.shape[1], rows.logits.device
    filters = _filters(params, vocab_size, device)
    total = _total(rows, filters)
    least = torch.where(filters.top_k < vocab_size, filters.top_k, 1).squeeze(-1)
    token_ids = torch.empty(len(params), dtype=torch.long, device=device)
    left = torch.ones(len(params), dtype=torch.bool, device=device)
    for cut in CUTS:
        at = (left & (least <= cut)).nonzero().squeeze(-1)
        if len(at):
            token_ids[at], exact = _by_rank(rows.of(at), filters.of(at), total[at], cut)
            left[at] = ~exact
    at = left.nonzero().squeeze(-1)
    if len(at):
        token_ids[at] = _by_id(rows.of(at), filters.of(at))
    return token_ids


def _filters(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Filters:
    top_k = [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params]
    top_p = [each.top_p if each.top_p < 1 else math.inf for each in params]
    min_x = [math.log(each.min_p) if each.min_p > 0 else -math.inf for each in params]
    return Filters(
        sent(top_k, device).unsqueeze(-1),
        sent(top_p, device, torch.float64).unsqueeze(-1),
        sent(min_x, device, torch.float32).unsqueeze(-1),
    )


def _total(rows: Rows, filters: Filters) -> torch.Tensor:
    """Weight of the vocabulary, float64 `[rows, 1]`; 0 where top_p is no share of it: not there, or after top_k."""
    needed = ((filters.top_k == rows.logits.shape[1]) & filters.top_p.isfinite()).squeeze(-1)
    total = torch.zeros_like(filters.top_p)
    at = needed.nonzero().squeeze(-1)
    if len(at):
        buckets = ranking.bucket_sum(rows.of(at).weights())
        total[at] = buckets.sum(dim=-1, keepdim=True, dtype=torch.float64)
    return total


def _by_rank(
    rows: Rows, filters: Filters, total: torch.Tensor, cut: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look at the best tokens of rows whose top_k, if any, is at most `cut`.

    Returns:
        Token ids `[rows]`, and for which rows they are exact: nothing that should be kept can lie beyond.
    """
    vocab_size = rows.logits.shape[1]
    n = min(cut + 1, vocab_size)  # one more, to see a tie at the border
    values, ids = ranking.largest(rows.logits, n)
    x = rows.scaled(values)
    weights = torch.where(torch.arange(n, device=x.device) < filters.top_k, x.double().exp(), 0.0)
    cdf = weights.cumsum(dim=-1)
    mass = torch.where(filters.top_k < vocab_size, cdf[:, -1:], total)
    kept = (cdf - weights < filters.top_p * mass) | filters.top_p.isinf()
    kept &= (x >= filters.min_x) & (weights > 0)
    kept[:, 0] = True
    last = kept.sum(dim=-1, keepdim=True) - 1
    # A tie with the last of the n may go on beyond it, and which of the tied ids the n hold would be chance.
    inside = (values.gather(1, last) > values[:, -1:]).squeeze(-1)
    return first_of(ids, weights.masked_fill_(~kept, 0.0), rows.noise), inside | (n == vocab_size)


def _by_id(rows: Rows, filters: Filters) -> torch.Tensor:
    """Look at all tokens. Token ids `[rows]`."""
    x = rows.scaled(rows.logits)
    weights = x.double().exp()
    if bool((filters.top_k < x.shape[1]).any()):
        weights *= head(x, torch.ones_like(weights), filters.top_k.double())
    if bool(filters.top_p.isfinite().any()):
        weights *= head(x, weights, filters.top_p * weights.sum(dim=-1, keepdim=True))
    weights *= x >= filters.min_x
    return first_of_all(weights.float(), rows.noise)
