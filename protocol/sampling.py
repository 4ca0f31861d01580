"""How the next token is chosen, per request."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class SamplingParams(BaseModel):
    """Sampling parameters of one request, under the names vLLM and OpenAI use.

    Values are checked strictly: `"16"` or `true` for `max_tokens` is an error, not sixteen or one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens to generate. None: as many as the context holds. A larger number is cut to that."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches this; 0 keeps one."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Keep this many likeliest tokens; 0 and -1 keep all."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    """Draws depend on (seed, choice, position) alone. None: a seed made from the job id."""
    ignore_eos: bool = False
    """Go on past an end-of-sequence token (benchmarks)."""
