"""What sampling costs beside the forward pass it follows.

    python -m bench.sampling [--rows 64] [--threads 1] [--step-ms MS]

Logits are made up: each row's probabilities fall with rank as rank ** -a (Zipf), a from 1.5 to 3, so that top_p 0.95
keeps 2 to about 240 tokens; in every sixteenth row a is 1.2 and it keeps thousands.

The share is of a step, forward pass and sampling, in CPU time, which others on the machine disturb least. Unless
`--step-ms` gives a forward pass of the model at hand, that is the matrix products alone of SmolLM2-135M's 30 layers
under a head of the large vocabulary. A real pass has attention and much else, and most models with such a vocabulary
are larger, so the share printed is the most it can be.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling import Draw, rules_for, sample
from protocol import SamplingParams

VOCAB = 151_936
LAYERS, HIDDEN, KEYS, INNER = 30, 576, 192, 1536
PROMPT, OUTPUT = 500, 200
"""Tokens that the penalised rows have behind them."""
REFERENCES = {"argmax": 2.7, "best 256, then top_p": 15.7, "top_p by a full sort": 714.0}
"""Plain torch, 32 rows on one core of the machine in `NOTES.md`, ms."""

PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
THIRDS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8}, {"top_p": 0.95, **PENALTIES}]
BATCHES: dict[str, list[dict[str, Any]]] = {
    "all greedy": [{"temperature": 0.0}],
    "all temperature 0.8": [{"temperature": 0.8}],
    "all top_p 0.95": [{"top_p": 0.95}],
    "all top_k 50": [{"top_k": 50}],
    "all min_p 0.05": [{"min_p": 0.05}],
    "mixed: greedy, temperature, top_p and penalties": THIRDS,
    "mixed, logprobs 5": [{**third, "logprobs": 5} for third in THIRDS],
    "all greedy, logprobs 5": [{"temperature": 0.0, "logprobs": 5}],
    "all greedy, penalties": [{"temperature": 0.0, **PENALTIES}],
}


class HalfTheVocabulary:
    """Stands for a grammar, so that its own time does not count. Implements `engine.interface.Matcher`."""

    def __init__(self, seed: int) -> None:
        words = -(-VOCAB // 32)
        self._mask = np.random.default_rng(seed).integers(-(2**31), 2**31, words).astype(np.int32)

    def allowed(self, mask: npt.NDArray[np.int32]) -> None:
        mask[:] = self._mask

    def push(self, token_id: int) -> None:
        """Always at the same place."""


def make_logits(rows: int) -> torch.Tensor:
    """Float32 `[rows, VOCAB]`."""
    noise = torch.Generator().manual_seed(0)
    fall = torch.rand(rows, generator=noise) * 1.5 + 1.5
    fall[::16] = 1.2
    ranks = torch.stack([torch.randperm(VOCAB, generator=noise) for _ in range(rows)])
    return -(ranks + 1.0).log() * fall.unsqueeze(-1)


def make_draws(kinds: Sequence[dict[str, Any]], rows: int, grammar: bool = False) -> list[Draw]:
    """Draws of a batch whose rows are of the given kinds in turn."""
    ids = np.random.default_rng(1).integers(0, VOCAB, (rows, PROMPT + OUTPUT)).tolist()
    draws = []
    for row in range(rows):
        params = SamplingParams(**kinds[row % len(kinds)])
        rules = rules_for(
            params,
            ids[row][:PROMPT],
            VOCAB,
            end_ids=frozenset(),
            bad_words=(),
            matcher=HalfTheVocabulary(row) if grammar else None,
            output_token_ids=ids[row][PROMPT:],
        )
        draws.append(Draw(params, row, 0, OUTPUT, rules))
    return draws


def make_step(rows: int) -> Callable[[], None]:
    """The matrix products of a forward pass, each with weights of its own, as they are read from memory."""
    shapes = [(HIDDEN, HIDDEN), (HIDDEN, KEYS), (HIDDEN, KEYS), (HIDDEN, HIDDEN)]
    shapes += [(HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)]
    linears = [torch.randn(out, into) for into, out in shapes * LAYERS + [(HIDDEN, VOCAB)]]
    inputs = {into: torch.randn(rows, into) for into in (HIDDEN, INNER)}

    def step() -> None:
        for linear in linears:
            torch.nn.functional.linear(inputs[linear.shape[1]], linear)

    return step


def milliseconds(call: Callable[[], Any], times: int) -> tuple[float, float]:
    """By the clock and of CPU time, medians of some calls after one that is not counted."""
    call()
    taken = []
    for _ in range(times):
        began, worked = time.perf_counter(), time.process_time()
        call()
        taken.append((1000 * (time.perf_counter() - began), 1000 * (time.process_time() - worked)))
    clock, cpu = zip(*taken, strict=True)
    return median(clock), median(cpu)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--times", type=int, default=9, help="calls a median is taken of")
    parser.add_argument("--step-ms", type=float, help="a forward pass of the model at hand, CPU time")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        step = args.step_ms or milliseconds(make_step(args.rows), min(args.times, 5))[1]
    logits = make_logits(args.rows)
    batches = {what: make_draws(kinds, args.rows) for what, kinds in BATCHES.items()}
    batches["all greedy under a grammar"] = make_draws([{"temperature": 0.0}], args.rows, grammar=True)
    print(
        f"{args.rows} rows of {VOCAB:,} logits, {args.threads} thread(s), forward pass {step:.0f} ms of CPU"
    )
    print(f"{'':50}{'ms':>8}{'ms of CPU':>12}{'share of a step':>18}")
    for what, draws in batches.items():
        clock, cpu = milliseconds(partial(sample, logits, draws), args.times)
        print(f"{what:50}{clock:8.1f}{cpu:12.1f}{cpu / (cpu + step):18.1%}")
    for what, taken in REFERENCES.items():
        print(f"{'for comparison, plain torch: ' + what:50}{taken * args.rows / 32:8.1f}")


if __name__ == "__main__":
    main()
