"""Options that more than one verb takes, each declared once."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

RedisUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Server of the queue. Else REDIS_URL, else MILLSTREAM_REDIS_URL, else the embedded broker.",
    ),
]
QueueName = Annotated[str, typer.Option(metavar="NAME", envvar="MILLSTREAM_QUEUE", help="Name of the queue.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]


def seconds(value: float | None) -> float | None:
    """A time one can wait.

    Raises:
        typer.BadParameter: it is none.
    """
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise typer.BadParameter(f"{value} is no time to wait: give seconds, 0 or more")
    return value


MaxTokens = Annotated[
    int | None, typer.Option(metavar="N", envvar="MILLSTREAM_MAX_TOKENS", help="Most tokens to generate.")
]
Temperature = Annotated[
    float | None, typer.Option(metavar="T", envvar="MILLSTREAM_TEMPERATURE", help="0 is greedy. [default: 1]")
]
TopP = Annotated[
    float | None,
    typer.Option(metavar="P", help="Sample from the likeliest tokens that reach this probability."),
]
TopK = Annotated[int | None, typer.Option(metavar="K", help="Sample from this many likeliest tokens.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Seed of the draws.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past an end-of-sequence token.")]


def sampling(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    ignore_eos: bool,
) -> dict[str, Any]:
    """The sampling parameters that were given, by their names in `SamplingParams`."""
    flags: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "ignore_eos": ignore_eos or None,
    }
    return {name: value for name, value in flags.items() if value is not None}
