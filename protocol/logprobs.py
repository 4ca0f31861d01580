"""Log-probabilities as they travel: plain dictionaries, written at every step and read by few.

They are the model's own, before temperature, penalties, masks and filters (vLLM's `raw_logprobs`). A token the model
itself rules out has `FLOOR` instead of minus infinity, which strict JSON cannot say.
"""

from __future__ import annotations

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

FLOOR = -9999.0


class TopLogprob(TypedDict):
    """One of the likeliest tokens at a place."""

    token_id: int
    token: str
    """Its text by itself: part of a character shows as U+FFFD."""
    logprob: float


class TokenLogprob(TypedDict):
    """The token at a place, and what else was likely there, the likelier first."""

    token_id: int
    token: str
    logprob: float
    rank: int
    """1 for the likeliest."""
    top_logprobs: list[TopLogprob]
