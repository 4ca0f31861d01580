"""What each step computes.

There is no prefill phase and no decode phase. Every running sequence has tokens it knows and tokens whose KV is
computed, and each step lets it catch up, under a budget of tokens:

    budget 8, block_size 4       step 1        step 2        step 3
    a (prompt of 3)              p p p         o             o
    b (prompt of 10)             p p p p p     p p p p p     o
    c (arrives late)                           p p           p p p p p p
                                               ^ decodes first, then prompts in order, then admission

A prompt larger than the budget spans steps, a preempted sequence computes its tokens again, a resumed one computes
those of its earlier attempt: all of it is catching up. (The idea is vLLM V1's scheduler.) What another sequence has
computed already need not be caught up with:

    equal prefix        full blocks are shared, as far as the prefix cache knows them
    choices of one      the first computes the prompt; the others enter when it is done, share its full blocks and
    prompt (n > 1)      copy the one that the prompt ends in

At least one token is always computed: its logits are what the next one is drawn from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from engine.blocks import BlockPool
from engine.forecast import Ahead, Forecast
from engine.interface import Request
from engine.order import Order
from engine.pace import LEAST
from engine.reuse import Reuse
from engine.sequence import Line, Sequence, place
from engine.slots import WINDOW, SlotAllocator
from protocol import ErrorCode, RequestError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Plan:
    """One step: which sequences compute how many of their tokens, decodes first."""

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    outgrown: list[Sequence] = field(default_factory=list)
    """Sequences that filled the whole pool alone; they hold nothing any more and end here."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy before anything is computed, `(from, to)`."""


class Scheduler:
    """Owns the line of waiting sequences, the running ones, and what they occupy. Knows no model."""

    def __init__(self, blocks: BlockPool, slots: SlotAllocator, max_num_batched_tokens: int) -> None:
        """
        Args:
            blocks: the KV store's blocks.
            slots: at most as many as the budget, so that every decode has its token in every step.
            max_num_batched_tokens: the budget, tokens a step.

        Raises:
            ValueError: more slots than budget.
        """
        if slots.num_slots > max_num_batched_tokens:
            raise ValueError(
                f"{slots.num_slots} slots need a budget of as many tokens, not {max_num_batched_tokens}"
            )
        self.blocks = blocks
        self.slots = slots
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = Line()
        self.running = Line()
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        """Prompt tokens that were not computed because their KV was there."""
        self.num_recomputed_tokens = 0
        """Tokens computed again after a preemption."""
        self.forecast = Forecast(blocks)
        self.reuse = Reuse(blocks)
        self._order = Order(self.reuse, self.forecast.lengths)
        self._arrivals = 0
        self._admitted_since_arrival = 0

    def add(self, request: Request, choices: Iterable[int] | None = None) -> list[Sequence]:
        """Put a request in line, or those of its choices that are not over.

        Raises:
            RequestError: the tokens of one of them are more than the whole pool holds.
        """
        first = self._arrivals + 1
        chosen = range(request.num_choices) if choices is None else choices
        sequences = [Sequence(request, choice, arrival) for arrival, choice in enumerate(chosen, first)]
        need = max(sequence.num_tokens for sequence in sequences)
        if need > self.blocks.capacity:
            raise RequestError(
                ErrorCode.KV_CAPACITY_EXCEEDED,
                f"the request needs KV for at least {need} tokens and the pool holds {self.blocks.capacity}: "
                "shorten the prompt, or give the worker more KV memory",
            )
        self._arrivals += len(sequences)
        self._admitted_since_arrival = 0
        leader = None
        for sequence in sequences:
            if leader is not None and request.prompt_of(leader.choice) == request.prompt_of(sequence.choice):
                sequence.leader = leader
                leader.followers.append(sequence)
            else:
                leader = sequence
                self.waiting.add(sequence)
        return sequences

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence go, finished or aborted; its slot and blocks are free at once.

        A leader that is aborted takes its followers with it: they are removed too, in any order.
        """
        if sequence.slot is not None:
            self._retire(sequence)
        elif sequence.leader is not None and sequence in sequence.leader.followers:
            sequence.leader.followers.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self.reuse.leave(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Let a sequence go that has come to its end; its length is remembered.

        It may have been preempted before its last token was read.
        """
        self.forecast.lengths.observe(sequence.num_output_tokens)
        self.remove(sequence)

    def take_back(self, sequence: Sequence) -> None:
        """Put a sequence in line again that was let go before its last token was read, which nobody ever will."""
        self.waiting.add(sequence)

    def send_all_back(self, keep_cache: bool) -> None:
        """Send whoever runs back to their place in line: their KV is computed again.

        Args:
            keep_cache: whether what idle blocks hold can still be trusted.
        """
        for sequence in list(self.running):
            sequence.num_lost_tokens = sequence.num_computed_tokens
            self._retire(sequence)
            self.waiting.add(sequence)
            self.num_preemptions += 1
        for sequence in self.waiting:  # a path may lead through a token that is drawn anew
            self.reuse.leave(sequence)
        if not keep_cache:
            self.blocks.forget_idle()

    def computed(self, sequence: Sequence, count: int) -> None:
        """Note that a step has computed tokens of a running sequence."""
        before = sequence.num_computed_tokens
        sequence.num_computed_tokens += count
        self.reuse.computed(sequence, before)
        if sequence.followers and sequence.has_computed_prompt:
            for follower in sequence.followers:
                self.waiting.add(follower)
            sequence.followers = []

    def has_work(self) -> bool:
        return bool(self.running) or bool(self.waiting)

    def schedule(self, budget: int | None = None, most_running: int | None = None) -> Plan:
        """Plan the next step. Empty only if there is no work, or if all of it is in `outgrown`.

        Args:
            budget: tokens, at most `max_num_batched_tokens`, which it is if not given. Every decode has its token
                even so, and a prompt that has begun gets on by `LEAST`; nobody is admitted beyond it.
            most_running: nobody is admitted beside so many; as many as there are slots if not given.
        """
        plan = Plan()
        left = self.max_num_batched_tokens - self._plan_decodes(plan)
        within = left if budget is None else min(left, budget - len(plan.chunks))
        within -= self._plan_prefills(plan, min(left, max(within, LEAST)))
        self._admit(plan, max(within, 0), self.slots.num_slots if most_running is None else most_running)
        return plan

    def check_integrity(self) -> None:
        """Check the books of blocks and slots.

        Raises:
            IntegrityError: they do not balance.
        """
        self.blocks.check_integrity(sequence.block_table for sequence in [*self.running, *self.waiting])
        self.slots.check_integrity(self.running)
        self.reuse.check_integrity([*self.running, *self.waiting])

    def _plan_decodes(self, plan: Plan) -> int:
        """One token for every sequence that lacks only one, in order, so that a victim is never planned yet."""
        for sequence in list(self.running):
            if sequence.slot is None or sequence.num_uncomputed_tokens > 1:
                continue
            if len(sequence.block_table) == self.blocks.num_blocks and self._lacks_block(sequence):
                self._retire(sequence)
                plan.outgrown.append(sequence)
            elif self._grow(sequence):
                plan.chunks.append((sequence, 1))
        return len(plan.chunks)

    def _plan_prefills(self, plan: Plan, budget: int) -> int:
        """What is left of the budget goes to sequences that lack more; they hold their blocks already."""
        left = budget
        for sequence in self.running:
            if left and sequence.num_uncomputed_tokens > 1:
                count = min(sequence.num_uncomputed_tokens, left)
                plan.chunks.append((sequence, count))
                left -= count
        return budget - left

    def _admit(self, plan: Plan, budget: int, most_running: int) -> None:
        """Let waiting sequences in, each with the blocks of all its known tokens.

        One free block per running sequence is left alone: each may need its next one before anybody ends, and a
        newcomer let in too tightly would be preempted a step later with its prefill wasted.
        """
        while budget and self.waiting and self.slots.num_free and len(self.running) < most_running:
            self.reuse.want(self.waiting.window(WINDOW))
            spare = self.blocks.num_free - len(self.running)
            need = partial(self._need_if_it_fits, self.forecast.ahead(self.running), spare)
            sequence = self.slots.admit(self.waiting, need, spare, self._in_order)
            if sequence is None:
                return
            self._admitted_since_arrival += 1
            self._place(sequence, plan)
            self.running.add(sequence)
            count = min(sequence.num_uncomputed_tokens, budget)
            plan.chunks.append((sequence, count))
            budget -= count

    def _in_order(self, window: list[Sequence]) -> list[Sequence]:
        """Who may be let in, the best first. The end is near when nobody has come for as long as the line is."""
        few = len(self.waiting) <= self.slots.num_slots
        return self._order(window, few and self._admitted_since_arrival >= len(self.waiting))

    def _need(self, sequence: Sequence) -> int:
        """Blocks to take on admission. An idle block that is taken over counts too: it is one of the free ones."""
        need = self.blocks.blocks_for(sequence.num_tokens)
        if led := self._led(sequence):
            return need - led // self.blocks.block_size
        return need - sum(self.blocks.num_owners(block) > 0 for block in self.reuse.cached(sequence))

    def _need_if_it_fits(self, ahead: Ahead, spare: int, sequence: Sequence) -> int:
        """As `_need`; more than there is where the pool would overflow before enough others have ended."""
        need = self._need(sequence)
        if need <= spare and self.running and not self.forecast.fits(ahead, sequence, need):
            return self.blocks.num_blocks + 1
        return need

    def _led(self, sequence: Sequence) -> int:
        """Tokens whose KV the leader has."""
        leader = sequence.leader
        if leader is None or leader.slot is None or not leader.has_computed_prompt:
            return 0
        return min(len(sequence.prompt), sequence.num_tokens - 1)

    def _place(self, sequence: Sequence, plan: Plan) -> None:
        """Give a sequence its blocks: those that hold its KV already, and new ones."""
        size = self.blocks.block_size
        led = self._led(sequence)
        leader = sequence.leader
        shared = leader.block_table[: led // size] if leader and led else self.reuse.cached(sequence)
        self.blocks.share(shared)
        new = self.blocks.allocate(self.blocks.blocks_for(sequence.num_tokens) - len(shared))
        if led % size:
            assert leader is not None
            plan.copies.append((leader.block_table[led // size], new[0]))
        sequence.block_table = shared + new
        sequence.num_computed_tokens = len(shared) * size + led % size
        self.reuse.enter(sequence, len(shared))
        self.num_cached_tokens += min(sequence.num_computed_tokens, len(sequence.prompt))
        self.num_recomputed_tokens += max(0, sequence.num_lost_tokens - sequence.num_computed_tokens)
        sequence.num_lost_tokens = 0

    def _lacks_block(self, sequence: Sequence) -> bool:
        return len(sequence.block_table) * self.blocks.block_size < sequence.num_tokens

    def _grow(self, sequence: Sequence) -> bool:
        """Give a sequence the block its next token needs; False if it had to make room for others itself."""
        if not self._lacks_block(sequence):
            return True
        while not self.blocks.num_free:  # a victim that only shared its blocks frees none
            victim = self._victim(sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_table += self.blocks.allocate(1)
        return True

    def _victim(self, sequence: Sequence) -> Sequence:
        """Whom to send back: of the lowest priority, who has the least to compute again; nobody planned already."""
        behind = [other for other in self.running if not place(other) < place(sequence)]
        lowest = max(other.priority for other in behind)
        return min(
            (other for other in behind if other.priority == lowest),
            key=lambda other: (self._waste(other), -other.arrival),
        )

    def _waste(self, sequence: Sequence) -> int:
        """Tokens whose KV is lost with a sequence: what others hold too is not."""
        shared = sum(self.blocks.num_owners(block) > 1 for block in sequence.block_table)
        return sequence.num_computed_tokens - shared * self.blocks.block_size

    def _preempt(self, sequence: Sequence) -> None:
        """Send a sequence back to its place in line; it keeps its tokens and computes their KV again."""
        logger.info("request %s preempted at %d tokens: no free block", sequence.id, sequence.num_tokens)
        sequence.num_lost_tokens = sequence.num_computed_tokens
        self.reuse.withdraw(sequence)
        self._stop(sequence)
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def _retire(self, sequence: Sequence) -> None:
        """Let a running sequence go for good."""
        self.reuse.leave(sequence)
        self._stop(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.slots.release(sequence)
        self.blocks.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
