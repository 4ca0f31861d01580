"""One step after the other.

    schedule --> launch: forward --> read: append, text, stops, ends --> deltas
        ^                                                 |
        '-- blocks and slots of what ended or left -- launch: draw

With overlap, a step is launched before the tokens of the one before are read, so the device is never idle while the
host writes text. A sequence whose token is not read yet goes on with a 0 in its place; the runner takes the token
from what was drawn, on the device:

    host     schedule 2  launch 2  read 1  draw 2 | schedule 3  launch 3  read 2  draw 3 | ...
    device   [ forward 1, draw 1 ]  [        forward 2         ] [draw 2] [      forward 3       ] ...

A draw is launched only when the step before has been read, so rules, grammar and penalties know all of the output.
That an output ends by its length is known beforehand: it leaves when its last draw is launched. That it ends by what
was drawn is found one step late: the row computed for it meanwhile is thrown away. What is freed while a launched
step still writes to it is written anew by later steps only, and a device does one after the other.

Without overlap each draw is read at once, in the same order. On a CPU `forward` returns when all is done, so there is
nothing to overlap, and a token would be told one step late.

A step that the device cannot compute (no memory, above all) has told nothing yet: whoever runs waits again, what was
drawn and not read is drawn anew, which gives the same token, and fewer run from then on (`engine.breaker`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

import torch

from engine.breaker import Breaker, Fault, fault_of
from engine.counters import Counters
from engine.interface import Chunk, Delta, EngineStats, Runner
from engine.pace import Pace
from engine.running import Roster, Running
from engine.sampling import Drawn, Logprobs, Problem, launch, prompt_logprobs
from engine.sampling.ranking import take
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sequence
from engine.stopwatch import Stopwatch
from protocol import ErrorCode, RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A forward pass, and whom it is for."""

    running: list[Running]
    chunks: list[Chunk]
    logits: torch.Tensor
    at: float
    """When, on the performance counter."""


@dataclass(frozen=True, slots=True)
class _Unread:
    """A draw, perhaps of nobody, and whom its rows are for."""

    running: list[Running]
    drawn: Drawn
    num_tokens: int
    """Computed in its step."""
    launched_at: float


class Loop:
    """Owns the choices that are not over and what is launched for them."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, pace: Pace, breaker: Breaker, overlap: bool
    ) -> None:
        """
        Args:
            runner: computes.
            scheduler: decides what.
            pace: its budget a step.
            breaker: the same, after faults of the device.
            overlap: whether a step is launched before the last one's tokens are read.
        """
        self.roster = Roster()
        self._runner = runner
        self._scheduler = scheduler
        self._pace = pace
        self._breaker = breaker
        self._overlap = overlap
        self._unread: _Unread | None = None
        self._read_at = 0.0
        """When the last draw was read."""
        self._watch = Stopwatch()
        self._counters = Counters()

    def step(self) -> list[Delta]:
        """Compute one step, and tell what it, or with overlap the one before, has made.

        Raises:
            DeviceLost: the device fails again and again; the state is not to be used after it.
            Exception: whatever else the forward pass raises; as above.
        """
        self._watch.start()
        breaker = self._breaker
        plan = self._scheduler.schedule(min(self._pace.budget, breaker.tokens), breaker.sequences)
        self._watch.lap("schedule")
        deltas: list[Delta] = []
        fault = self._try(plan, deltas)
        if fault is not None:
            self._recover(plan, fault, deltas)
        elif plan.chunks:
            breaker.went_well()
        self._forget_if_idle()
        self._watch.lap("output")
        return deltas

    def drop(self, request_id: str) -> bool:
        """Let go of a request in any state; False if it is not here."""
        dropped = self.roster.drop(request_id)
        for running in dropped:
            if not running.left:
                self._scheduler.remove(running.sequence)
        self._forget_if_idle()
        return bool(dropped)

    def stats(self) -> EngineStats:
        return self._counters.stats(self._scheduler, self._runner, self._watch.total())

    def _forget_if_idle(self) -> None:
        """A draw for nobody is not read after the pause: the pause would count as the time of its step."""
        if not self.roster:
            self._unread = None

    def _try(self, plan: Plan, deltas: list[Delta]) -> Fault | None:
        """Compute a step and add what it tells; the device's fault if it could not be computed."""
        try:
            outgrown = [self._outgrow(sequence) for sequence in plan.outgrown]
            launched = self._launch(plan) if plan.chunks else None
            self._read(deltas)
            deltas += [self._cut(running) for running in outgrown if not running.gone]
            if launched is not None:
                self._draw(launched, deltas)
            if not self._overlap:
                self._read(deltas)
        except Exception as error:
            fault = fault_of(error)
            if fault is None:
                raise
            return fault
        return None

    def _recover(self, plan: Plan, fault: Fault, deltas: list[Delta]) -> None:
        """Go back to what has been told, with nobody running.

        Raises:
            DeviceLost: it is of no use.
        """
        self._watch.lap("forward")
        self._unread = None
        flying = [one for one in self.roster if one.row is not None or one.sequence.slot is not None]
        outgrown = [one for one in self.roster if one.left and one.row is None]
        for one in flying:
            if one.row is not None:
                one.row = None
                one.sequence.expect_no_token()
                if one.left:
                    one.left = False
                    self._scheduler.take_back(one.sequence)
        deltas += [self._cut(one) for one in outgrown]
        self._scheduler.send_all_back(keep_cache=fault.kind == "memory")
        self._scheduler.check_integrity()
        if not self._breaker.failed(fault, len(flying), sum(count for _, count in plan.chunks)):
            error = RequestError(ErrorCode.DEVICE_ERROR, f"the device could not compute it: {fault.message}")
            deltas += [self._failed(one, error) for one in flying if not one.gone]
        if self._runner.is_asynchronous and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _launch(self, plan: Plan) -> _Launched:
        """Start a forward pass."""
        self._counters.step(self._scheduler, plan.chunks)
        if plan.copies:
            self._runner.copy_blocks(plan.copies)
        running = [self.roster.of(sequence) for sequence, _ in plan.chunks]
        chunks = [_chunk(one, count) for one, (_, count) in zip(running, plan.chunks, strict=True)]
        self._watch.lap("schedule")
        at = perf_counter()
        logits = self._runner.forward(chunks, self._unread.drawn.token_ids if self._unread else None)
        self._watch.lap("forward")
        return _Launched(running, chunks, logits, at)

    def _draw(self, launched: _Launched, deltas: list[Delta]) -> None:
        """Start drawing a token for each choice whose sequence has caught up; tell the prompts that ask for it."""
        told = len(deltas)
        drawing: list[Running] = []
        rows: list[int] = []
        row = num_tokens = 0
        for running, chunk in zip(launched.running, launched.chunks, strict=True):
            num_tokens += len(chunk.token_ids)
            first, row = row, row + chunk.num_logits
            if self._computed(running, chunk):
                drawing.append(running)
                rows.append(row - 1)
            if running.sequence.wants_prompt_logits and not running.gone:
                deltas += self._tell_prompt(running, launched.logits[first:row], chunk)
        if len(deltas) > told:  # a prompt's failure ends its request
            rows = [row for row, running in zip(rows, drawing, strict=True) if not running.gone]
            drawing = [running for running in drawing if not running.gone]
        self._watch.lap("output")
        drawn = launch(take(launched.logits, rows), [running.choice.draw for running in drawing])
        self._unread = _Unread(drawing, drawn, num_tokens, launched.at)
        for row, running in enumerate(drawing):
            running.row = row
            running.sequence.expect_token()
            if running.choice.draws_its_last:
                running.left = True
                self._scheduler.finish(running.sequence)
        self._watch.lap("sample")

    def _computed(self, running: Running, chunk: Chunk) -> bool:
        """Take note of a computed chunk; whether a token is to be drawn now."""
        sequence, computed = running.sequence, len(chunk.token_ids)
        if running.gone:
            self._counters.padding_rows += computed
            return False
        if chunk.start < len(sequence.prompt):
            self._counters.prompt_tokens += min(computed, len(sequence.prompt) - chunk.start)
        self._scheduler.computed(sequence, computed)
        return sequence.num_uncomputed_tokens == 0

    def _read(self, deltas: list[Delta]) -> None:
        """Wait for the tokens that were drawn last, and give each to its choice."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        sampled = unread.drawn.read()
        now = perf_counter()
        self._pace.note(unread.num_tokens, now - max(unread.launched_at, self._read_at))
        self._read_at = now
        self._watch.lap("sample")
        for running, token_id, problem, logprobs in zip(
            unread.running, sampled.token_ids, sampled.problems, sampled.logprobs, strict=True
        ):
            running.row = None
            if running.gone:  # its request has been aborted, or has failed in this very loop
                continue
            try:
                deltas.append(self._append(running, token_id, problem, logprobs))
            except Exception as error:
                deltas.append(self._failed(running, error))
        self._watch.lap("output")

    def _append(
        self, running: Running, token_id: int, problem: Problem | None, logprobs: Logprobs | None
    ) -> Delta:
        """Give a choice the token that was drawn for it."""
        if problem is not None:
            raise _error(problem, running.choice.num_output_tokens)
        delta = running.choice.append(token_id, logprobs)
        self._counters.output_tokens += 1
        running.sequence.learn_token(token_id)
        if delta.finish_reason is not None:
            if not running.left:
                self._scheduler.finish(running.sequence)
            delta.last = self.roster.leave(running)
        return delta

    def _tell_prompt(self, running: Running, logits: torch.Tensor, chunk: Chunk) -> list[Delta]:
        """Note the log-probabilities of the prompt's tokens that follow those of a chunk.

        They travel with the first token, so there is a delta only where they end the request.
        """
        choice, sequence = running.choice, running.sequence
        top = sequence.request.params.prompt_logprobs
        assert top is not None
        if chunk.start == 0:  # the first time, or again after a preemption
            choice.prompt_logprobs = [None]
        following = sequence.prompt[chunk.start + 1 : chunk.start + 1 + len(chunk.token_ids)]
        try:
            told = prompt_logprobs(logits[: len(following)], following, top)
            choice.prompt_logprobs += map(choice.told, told)
        except Exception as error:
            if fault_of(error) is not None:
                raise
            return [self._failed(running, error)]
        sequence.wants_prompt_logits = len(choice.prompt_logprobs) < len(sequence.prompt)
        return []

    def _outgrow(self, sequence: Sequence) -> Running:
        """Note that a sequence has filled the whole pool and given it back; its last token may be still unread."""
        running = self.roster.of(sequence)
        running.left = True
        return running

    def _cut(self, running: Running) -> Delta:
        """The end of an outgrown choice."""
        sequence = running.sequence
        logger.info(
            "request %s ends at %d tokens: it fills the whole KV pool", sequence.id, sequence.num_tokens
        )
        delta = running.choice.cut()
        delta.last = self.roster.leave(running)
        return delta

    def _failed(self, running: Running, error: Exception) -> Delta:
        """The end of a request one of whose choices cannot go on; no other is touched."""
        request_id = running.sequence.id
        if not isinstance(error, RequestError):
            logger.error("request %s: a fault of the engine ends it", request_id, exc_info=error)
            error = RequestError(ErrorCode.ENGINE_ERROR, f"{type(error).__name__}: {error}")
        choice = running.choice
        self.drop(request_id)
        return Delta(
            request_id, [], choice.rest(), choice.index, finish_reason="error", error=error, last=True
        )


def _chunk(running: Running, count: int) -> Chunk:
    """The next tokens of a sequence; its last one may be drawn and not read."""
    sequence = running.sequence
    start = sequence.num_computed_tokens
    token_ids: Seq[int] = sequence.token_ids[start : start + count]
    reaches_end = start + count == sequence.num_tokens
    num_logits = count if sequence.wants_prompt_logits else int(reaches_end)
    return Chunk(token_ids, start, sequence.block_table, num_logits, running.row if reaches_end else None)


def _error(problem: Problem, num_output_tokens: int) -> RequestError:
    """What to say of a row that no token can be drawn from."""
    if isinstance(problem, RequestError):
        return problem
    if problem == "no_candidates":
        return RequestError(
            ErrorCode.NO_CANDIDATES,
            f"output token {num_output_tokens} cannot be drawn: allowed_token_ids, bad_words, min_tokens, logit_bias "
            "and response_format together leave no token",
        )
    return RequestError(
        ErrorCode.INVALID_LOGITS,
        f"output token {num_output_tokens} cannot be drawn: its logits are NaN or infinite",
    )
