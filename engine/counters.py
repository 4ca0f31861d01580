"""What an engine has done so far, and how much of what it holds is of use."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.interface import EngineStats, Runner, StepSeconds
from engine.scheduler import Scheduler
from engine.sequence import Sequence


class Counters:
    """Owns the sums over all steps; the scheduler and the block pool count their own."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.padding_rows = 0
        """Rows computed for sequences that turned out to have ended."""
        self._steps = 0
        self._slot_steps = 0
        self._kv_tokens_allocated = 0
        self._kv_tokens_unused = 0

    def step(self, scheduler: Scheduler, chunks: Seq[tuple[Sequence, int]]) -> None:
        """Note what is held in a step that has been planned and not been computed.

        A block that several sequences share is full, so what is unused lies in blocks of one owner each:

            table  [ o o o o ] [ o o o o ] [ o . . . ]     block_size 4, 9 tokens: 3 unused of 12
        """
        blocks, running = scheduler.blocks, scheduler.running
        room = used = 0
        for sequence in running:
            room += len(sequence.block_table)
            used += sequence.num_computed_tokens
        used += sum(count for _, count in chunks)
        self._steps += 1
        self._slot_steps += len(running)
        self._kv_tokens_allocated += blocks.num_used * blocks.block_size
        self._kv_tokens_unused += room * blocks.block_size - used

    def stats(self, scheduler: Scheduler, runner: Runner, seconds: StepSeconds) -> EngineStats:
        """Everything together.

        Args:
            scheduler: the engine's.
            runner: has its own padding, and graphs.
            seconds: where the time went.
        """
        blocks = scheduler.blocks
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            slots=scheduler.slots.num_slots,
            kv_blocks_used=blocks.num_used,
            kv_blocks_total=blocks.num_blocks,
            steps=self._steps,
            slot_steps=self._slot_steps,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            output_tokens=self.output_tokens,
            preemptions=scheduler.num_preemptions,
            recomputed_tokens=scheduler.num_recomputed_tokens,
            padding_rows=self.padding_rows + runner.num_padding_rows,
            graph_steps=runner.num_replays,
            evictions=blocks.num_evictions,
            kv_tokens_allocated=self._kv_tokens_allocated,
            kv_tokens_unused=self._kv_tokens_unused,
            seconds=seconds,
        )
