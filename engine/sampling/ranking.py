"""The largest logits of each row, without sorting the vocabulary.

    ids       0 .. 63 | 64 .. 127 | ... | the rest      buckets of 64 ids; the last may be shorter
    largest     3.1   |    7.4    | ... |   2.2

The k largest lie in the k buckets whose largest are largest. One pass over the vocabulary finds those, and the search
goes on in them alone. (151,936 ids, one core, ms a row: `max` with its index 0.33, in buckets 0.07; `topk` of 65
0.39, in buckets 0.16.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from engine.sampling.transfer import sent

BUCKET = 64
_MOST_IN_BUCKETS = 512
"""Beyond about this many, the buckets hold so much of the vocabulary that searching all of it is no slower."""
_CHUNK = 1 << 20
"""Logits worked on at once on a CPU: larger temporaries are fresh pages each time (exp of 151,936: 0.2 ms a row in
chunks, 0.5 for 64 rows at once)."""


def chunks(rows: list[int], logits: torch.Tensor) -> Iterator[list[int]]:
    """Rows in groups that are worked on at once."""
    at_once = max(1, _CHUNK // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(rows))
    for start in range(0, len(rows), at_once):
        yield rows[start : start + at_once]


def take(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Rows of `x` in rising order; a view where they lie side by side."""
    if not rows:
        return x[:0]
    if rows[-1] - rows[0] == len(rows) - 1:
        return x[rows[0] : rows[-1] + 1]
    return x.index_select(0, sent(rows, x.device))  # x[rows] takes five times as long on a CPU


def bucket_max(x: torch.Tensor) -> torch.Tensor:
    """The largest of each bucket: `[rows, buckets]` of `[rows, vocab]`; NaN where there is one."""
    whole, rest = _buckets(x)
    largest = whole.amax(dim=-1)
    return torch.cat([largest, rest.amax(dim=-1, keepdim=True)], dim=-1) if rest.shape[1] else largest


def bucket_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of each bucket: `[rows, buckets]` of `[rows, vocab]`."""
    whole, rest = _buckets(x)
    sums = whole.sum(dim=-1)
    return torch.cat([sums, rest.sum(dim=-1, keepdim=True)], dim=-1) if rest.shape[1] else sums


def _buckets(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views: the full buckets `[rows, buckets, 64]`, and what is left `[rows, fewer than 64]`."""
    count = x.shape[1] // BUCKET
    return x[:, : count * BUCKET].view(len(x), count, BUCKET), x[:, count * BUCKET :]


def ids_in(buckets: torch.Tensor) -> torch.Tensor:
    """Ids of some buckets of each row: `[rows, n]` to `[rows, n * 64]`. The last bucket may go beyond the end."""
    return (buckets.unsqueeze(-1) * BUCKET + torch.arange(BUCKET, device=buckets.device)).flatten(1)


def argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row of `[rows, vocab]` and its smallest id. With NaN in a row the largest is NaN."""
    largest, bucket = bucket_max(x).max(dim=-1)
    ids = ids_in(bucket.unsqueeze(-1)).clamp(max=x.shape[1] - 1)
    return largest, ids.gather(1, x.gather(1, ids).argmax(dim=-1, keepdim=True)).squeeze(-1)


def largest(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row and their ids, the larger first, ties by id, the smaller first.

    Where the smallest of them is tied with others beyond, which of the tied ids are among them is chance: whoever
    depends on it asks for one more than needed and looks whether that is smaller.
    """
    vocab_size = x.shape[1]
    if count >= vocab_size:
        return torch.sort(x, dim=-1, descending=True, stable=True)
    if count <= min(_MOST_IN_BUCKETS, vocab_size // BUCKET):
        buckets = bucket_max(x).topk(count, dim=-1, sorted=False).indices
        ids = ids_in(buckets)
        inside = x.gather(1, ids.clamp(max=vocab_size - 1)).masked_fill_(ids >= vocab_size, -torch.inf)
        values, places = inside.topk(count, dim=-1, sorted=False)
        ids = ids.gather(1, places)
    else:
        values, ids = x.topk(count, dim=-1, sorted=False)
    by_id = ids.argsort(dim=-1)
    values, ranks = torch.sort(values.gather(1, by_id), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, by_id).gather(1, ranks)
