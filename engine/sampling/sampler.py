"""One token a row for a whole batch: launched where the logits are, read when the host needs to know.

    launch   argmax --> draw --> rules: adjust, argmax, draw --> Drawn     token ids on the device, for the next step
    read                                                          '---> Sampled     on the host, with what went wrong

Launching waits for the device in two cases only: rows with top_k, top_p or min_p (how many of them each cut serves is
looked up, `engine.sampling.filters`), and rows whose log-probabilities are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from engine.sampling import logprobs as told
from engine.sampling import ranking
from engine.sampling.adjust import apply
from engine.sampling.draw import Draw, draw, noise_for
from engine.sampling.logprobs import Logprobs
from engine.sampling.transfer import Readback, sent
from protocol import RequestError

Problem = Literal["invalid_logits", "no_candidates"] | RequestError
"""Why no token can be drawn: logits with NaN or +inf, or nothing but -inf; rules that left nothing; or what the row's
grammar raised."""
_FINE, _INVALID, _NONE_LEFT = 0, 1, 2
_SAID: dict[int, Problem] = {_INVALID: "invalid_logits", _NONE_LEFT: "no_candidates"}


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was drawn, one entry a row each."""

    token_ids: list[int]
    """0 where there is a problem."""
    problems: list[Problem | None]
    logprobs: list[Logprobs | None]
    """Where asked for and there is no problem."""


@dataclass(slots=True)
class Drawn:
    """What is being drawn."""

    token_ids: torch.Tensor
    """int64 `[rows]`, where the logits are; ids of the vocabulary, whatever goes wrong."""
    _coming: Readback
    """int64 `[2, rows]`: token ids and verdicts."""
    _failures: dict[int, RequestError]
    """By row: what a grammar raised."""
    _logprobs: dict[int, Logprobs] = field(default_factory=dict)
    """By row, where asked for."""

    def read(self) -> Sampled:
        """Wait for the tokens, and for nothing that was launched after them."""
        token_ids, verdicts = self._coming.tolist()
        if not self._logprobs and not any(verdicts) and not self._failures:
            nothing = [None] * len(token_ids)
            return Sampled(token_ids, list(nothing), list(nothing))
        problems = [
            _SAID[verdict] if verdict == _INVALID else self._failures.get(row) or _SAID.get(verdict)
            for row, verdict in enumerate(verdicts)
        ]
        return Sampled(token_ids, problems, [self._logprobs.get(row) for row in range(len(token_ids))])


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> Sampled:
    """Choose one token a row and wait for it; see `launch`."""
    return launch(logits, draws).read()


@torch.inference_mode()
def launch(logits: torch.Tensor, draws: Sequence[Draw]) -> Drawn:
    """Begin to choose one token a row. A row's token depends on its own logits and its own draw, on nothing else.

    Args:
        logits: floating point `[rows, vocab]`, on any device; left as they are.
        draws: one a row, as they stand now.
    """
    best, token_ids = ranking.argmax(logits)
    verdicts = torch.where(best.isfinite(), _FINE, _INVALID)
    drawn = [row for row, each in enumerate(draws) if each.rules is None and each.params.temperature > 0]
    ruled = [row for row, each in enumerate(draws) if each.rules is not None]
    noise = noise_for(draws, logits.shape[1], logits.device)
    failures: dict[int, RequestError] = {}
    for rows in ranking.chunks(drawn, logits):
        at = sent(rows, logits.device)
        token_ids[at] = draw(ranking.take(logits, rows), best[at], noise[at], [draws[row] for row in rows])
    for rows in ranking.chunks(ruled, logits):
        at = sent(rows, logits.device)
        x = logits.index_select(0, at).float()
        token_ids[at], some, failed = _draw_ruled(x, noise[at], [draws[row] for row in rows])
        verdicts[at] = torch.where((verdicts[at] == _FINE) & ~some, _NONE_LEFT, verdicts[at])
        failures |= {row: error for row, error in zip(rows, failed, strict=True) if error is not None}
    # A row of NaN may have left any number, and what is drawn is looked up in the next step's embedding.
    token_ids = torch.where(verdicts == _FINE, token_ids, 0)
    begun = Drawn(token_ids, Readback(torch.stack([token_ids, verdicts])), failures)
    begun._logprobs = _logprobs(logits, draws, begun)
    return begun


def _draw_ruled(
    x: torch.Tensor, noise: torch.Tensor, draws: Sequence[Draw]
) -> tuple[torch.Tensor, torch.Tensor, list[RequestError | None]]:
    """The same for rows with rules, whose logits (float32) may be written over.

    Returns:
        Token ids `[rows]`; bool `[rows]`, whether the rules have left any; why a row's grammar has failed.
    """
    failed = apply(x, [each.rules for each in draws if each.rules is not None])
    best, token_ids = ranking.argmax(x)
    rows = [row for row, each in enumerate(draws) if each.params.temperature > 0]
    if rows:
        at = sent(rows, x.device)
        token_ids[at] = draw(ranking.take(x, rows), best[at], noise[at], [draws[row] for row in rows])
    return token_ids, best.isfinite(), failed


def _logprobs(logits: torch.Tensor, draws: Sequence[Draw], begun: Drawn) -> dict[int, Logprobs]:
    """Log-probabilities of the rows that ask for some, by row; where any does, the tokens are waited for."""
    asked = {
        row: each.params.num_logprobs
        for row, each in enumerate(draws)
        if each.params.num_logprobs is not None
    }
    if not asked:
        return {}
    sampled = begun.read()
    rows = [row for row in asked if sampled.problems[row] is None]
    token_ids = [sampled.token_ids[row] for row in rows]
    return dict(zip(rows, told.of_rows(logits, rows, token_ids, [asked[row] for row in rows]), strict=True))
