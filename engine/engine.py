"""The engine: requests in, tokens out, one forward pass a step.

    step   schedule --> runner.forward --> sample --> append: text, stops, ends --> deltas
              ^                                            |
              '---- blocks and slots of what ended or left -'

A request is admitted at the first step that has room for it; each of its choices leaves in the step that ends it.
What goes wrong with one request (logits that are no numbers, rules that leave nothing to draw, a fault in its text)
ends that request and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from pydantic import ValidationError

from engine.blocks import BlockPool
from engine.bulk import Prompt, generate
from engine.choice import Choice, Tokens
from engine.interface import (
    Chunk,
    Delta,
    EngineStats,
    Grammar,
    GrammarCompiler,
    PromptEncoder,
    Request,
    Runner,
)
from engine.pace import Pace
from engine.requests import build_request, check_model
from engine.sampling import Logprobs, Problem, prompt_logprobs, sample
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sequence
from engine.slots import SlotAllocator
from engine.stopwatch import Stopwatch
from protocol import (
    ErrorCode,
    Fingerprint,
    Job,
    RequestError,
    Result,
    SamplingParams,
    describe_validation,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Running:
    """A choice that is not over, and where it stands in the schedule."""

    choice: Choice
    sequence: Sequence


class Engine:
    """Continuous batching over one model. Implements `engine.interface.EngineCore`.

    `prepare` may be called on any thread, everything else on one.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any,
        prompts: PromptEncoder,
        fingerprint: Fingerprint,
        eos_token_ids: Iterable[int],
        *,
        grammars: GrammarCompiler | None = None,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 512,
        max_step_ms: float | None = None,
        admission: str = "first-fit",
    ) -> None:
        """
        Args:
            runner: computes chunks; its KV blocks are ours to give out.
            tokenizer: decodes the output (a transformers tokenizer); None: no text, ids only.
            prompts: renders and tokenizes.
            fingerprint: the model's; a job that names another model is refused.
            eos_token_ids: any of them ends an output.
            grammars: compiles what `response_format` asks for; None: such jobs are refused.
            max_num_seqs: sequences that run at once; cut to `max_num_batched_tokens`.
            max_num_batched_tokens: tokens a step computes at most. More than 512 bought nothing on a CPU.
            max_step_ms: milliseconds a step should take at most: prompts are computed in smaller chunks, and
                nobody is admitted while the decodes alone take longer. None: no bound.
            admission: `first-fit`, `best-fit` or `priority`, see `engine.slots`.

        Raises:
            ValueError: no such admission policy, or a limit below 1.
        """
        self._runner = runner
        self._prompts = prompts
        self._grammars = grammars
        self._fingerprint = fingerprint
        self._tokens = Tokens(tokenizer, frozenset(eos_token_ids), runner.vocab_size)
        blocks = BlockPool(runner.num_kv_blocks, runner.block_size)
        slots = SlotAllocator(min(max_num_seqs, max_num_batched_tokens), admission)
        self._scheduler = Scheduler(blocks, slots, max_num_batched_tokens)
        self._live: dict[str, dict[int, _Running]] = {}
        """By request id and choice."""
        self._ended: dict[str, list[Delta]] = {}
        """Of resumed requests: choices that were at their end already. They are told with the next step."""
        self._pace = Pace(max_num_batched_tokens, max_step_ms)
        self._watch = Stopwatch()
        self._steps = self._prompt_tokens = self._output_tokens = self._bulk_calls = 0
        if runner.max_model_len > blocks.capacity:
            logger.warning(
                "the KV pool holds %d tokens, less than one sequence of max_model_len %d: longer ones end early",
                blocks.capacity,
                runner.max_model_len,
            )

    @classmethod
    def from_pretrained(cls, model: str, **options: Any) -> Engine:
        """Load a model and make its engine; `engine.loading.load_engine` says which options there are.

        Raises:
            ModelUnavailable: no such model, one that bypasses our attention, or too little memory.
            ValueError: an option outside its range.
        """
        from engine.loading import load_engine  # it builds engines

        return load_engine(model, **options)

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    @property
    def max_num_seqs(self) -> int:
        return self._scheduler.slots.num_slots

    def prepare(self, job: Job) -> Request:
        """Render, tokenize, compile and check a job; safe on any thread.

        Raises:
            RequestError: the job can never run here.
        """
        check_model(job, self._fingerprint.name)
        params = job.params
        return build_request(
            job,
            self._prompts.encode(job),
            self._runner.vocab_size,
            self._runner.max_model_len,
            bad_words=self._prompts.words(params.bad_words) if params.bad_words else (),
            grammar=self._grammar(params),
        )

    def add(self, request: Request) -> None:
        """Queue a request; it may run from the next step on.

        Raises:
            RequestError: its prompt can never fit the KV pool, its id is already here, or what is written of it
                does not follow its grammar.
        """
        if request.id in self._live or request.id in self._ended:
            raise RequestError(
                ErrorCode.INVALID_REQUEST, f"a request with the id {request.id} is already here"
            )
        ended: list[Delta] = []
        going: list[Choice] = []
        for choice in self._unended_choices(request):
            over = self._over(request, choice)
            if over is None:
                going.append(choice)
            else:
                ended.append(over)
        if going:
            sequences = self._scheduler.add(request, [choice.index for choice in going])
            for sequence, choice in zip(sequences, going, strict=True):
                sequence.wants_prompt_logits = choice.wants_prompt_logprobs
            running = map(_Running, going, sequences)
            self._live[request.id] = {one.choice.index: one for one in running}
        elif ended:
            ended[-1].last = True
        else:
            ended.append(Delta(request.id, [], "", last=True))
        if ended:
            self._ended[request.id] = ended

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Prepare and add in one: for use without a queue.

        Args:
            request_id: what its deltas are named by; unless `params` has a seed, its draws are seeded by it.
            prompt: text, token ids, or several of either; or a `Job`, which has its own id and parameters.

        Raises:
            RequestError: it can never run here; the message says which value is wrong.
        """
        try:
            job = prompt if isinstance(prompt, Job) else _job(request_id, prompt, params)
        except ValidationError as error:
            raise RequestError(ErrorCode.INVALID_REQUEST, describe_validation(error)) from None
        request = self.prepare(job)
        self.add(request)
        return request

    def abort(self, request_id: str) -> bool:
        """Drop a request in any state, with all its choices; no delta follows. False if it is not here.

        During a forward pass it is safe too: blocks are handed out again at the next step only.
        """
        ended = self._ended.pop(request_id, None) is not None
        choices = self._live.pop(request_id, None)
        if choices is None:
            return ended
        for running in choices.values():
            self._scheduler.remove(running.sequence)
        return True

    def has_work(self) -> bool:
        return bool(self._live) or bool(self._ended)

    def step(self) -> list[Delta]:
        """Run one step.

        Returns:
            What it made, at most one token a choice. Empty when there is no work.

        Raises:
            Exception: whatever the forward pass raises; the state is not to be used after it.
        """
        if not self.has_work():
            return []
        self._watch.start()
        deltas = [delta for ended in self._ended.values() for delta in ended]
        self._ended.clear()
        plan = self._scheduler.schedule(self._pace.budget)
        for sequence in plan.outgrown:
            deltas.append(self._outgrown(sequence))
        if plan.chunks:
            began = perf_counter()
            deltas += self._compute(plan)
            self._pace.note(sum(count for _, count in plan.chunks), perf_counter() - began)
            self._steps += 1
        if not self._live:
            self.check_integrity()
        return deltas

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            slots=scheduler.slots.num_slots,
            kv_blocks_used=scheduler.blocks.num_used,
            kv_blocks_total=scheduler.blocks.num_blocks,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            output_tokens=self._output_tokens,
            preemptions=scheduler.num_preemptions,
            recomputed_tokens=scheduler.num_recomputed_tokens,
            evictions=scheduler.blocks.num_evictions,
            seconds=self._watch.total(),
        )

    def check_integrity(self) -> None:
        """Check that no block or slot is owned by too many or lost. Runs by itself whenever the engine becomes idle.

        Raises:
            IntegrityError: the books do not balance.
        """
        self._scheduler.check_integrity()

    def generate(self, prompts: Seq[Prompt], params: SamplingParams | None = None) -> list[Result]:
        """Answer prompts in this process; see `engine.bulk.generate`."""
        self._bulk_calls += 1
        return generate(self, prompts, params, name=f"generate-{self._bulk_calls}")

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.response_format is None:
            return None
        if self._grammars is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, "response_format: this engine compiles no grammars")
        return self._grammars.compile(params.response_format)

    def _unended_choices(self, request: Request) -> list[Choice]:
        return [
            Choice(request, index, self._tokens)
            for index in range(request.num_choices)
            if not (request.written and request.written[index].ended)
        ]

    def _over(self, request: Request, choice: Choice) -> Delta | None:
        """The end of a resumed choice that has nothing left to compute, or that grew beyond this pool."""
        over = choice.over()
        if over is None and choice.num_output_tokens:
            num_prompt_tokens = len(request.prompts[request.prompt_of(choice.index)])
            if num_prompt_tokens + choice.num_output_tokens > self._scheduler.blocks.capacity:
                return choice.cut()
        return over

    def _compute(self, plan: Plan) -> list[Delta]:
        """One forward pass, and one token for each choice that has caught up."""
        if plan.copies:
            self._runner.copy_blocks(plan.copies)
        planned = [self._running(sequence) for sequence, _ in plan.chunks]
        chunks = [_chunk(sequence, count) for sequence, count in plan.chunks]
        self._watch.lap("schedule")
        logits = self._runner.forward(chunks)
        self._watch.lap("forward")
        deltas: list[Delta] = []
        drawing, rows, row = [], [], 0
        for running, chunk in zip(planned, chunks, strict=True):
            its_logits = logits[row : row + chunk.num_logits]
            row += chunk.num_logits
            if self._computed(running.sequence, chunk):
                drawing.append(running)
                rows.append(row - 1)
            if running.sequence.wants_prompt_logits:
                deltas += self._guarded(running, partial(self._tell_prompt, running, its_logits, chunk))
        self._watch.lap("output")
        if drawing:
            deltas += self._draw(drawing, logits if len(rows) == len(logits) else logits[rows])
        self._watch.lap("output")
        return deltas

    def _running(self, sequence: Sequence) -> _Running:
        return self._live[sequence.id][sequence.choice]

    def _computed(self, sequence: Sequence, chunk: Chunk) -> bool:
        """Take note of a computed chunk; whether a token is to be drawn now."""
        computed = len(chunk.token_ids)
        self._prompt_tokens += max(0, min(computed, len(sequence.prompt) - chunk.start))
        if sequence.slot is None:  # aborted while the pass ran
            return False
        self._scheduler.computed(sequence, computed)
        return sequence.num_uncomputed_tokens == 0

    def _draw(self, drawing: list[_Running], logits: torch.Tensor) -> list[Delta]:
        """A token for each row, and what it makes of its choice."""
        drawn = sample(logits, [running.choice.draw for running in drawing])
        self._watch.lap("sample")
        deltas: list[Delta] = []
        for running, token_id, problem, logprobs in zip(
            drawing, drawn.token_ids, drawn.problems, drawn.logprobs, strict=True
        ):
            deltas += self._guarded(running, partial(self._append, running, token_id, problem, logprobs))
        return deltas

    def _guarded(self, running: _Running, act: Callable[[], list[Delta]]) -> list[Delta]:
        """Do something for one choice; what goes wrong ends its request alone."""
        if running.sequence.slot is None:  # its request has been aborted or has failed in this step
            return []
        try:
            return act()
        except RequestError as error:
            return [self._failed(running, error)]
        except Exception as error:
            logger.exception("request %s: a fault of the engine ends it", running.sequence.id)
            fault = RequestError(ErrorCode.ENGINE_ERROR, f"{type(error).__name__}: {error}")
            return [self._failed(running, fault)]

    def _append(
        self, running: _Running, token_id: int, problem: Problem | None, logprobs: Logprobs | None
    ) -> list[Delta]:
        """Give a choice its next token."""
        choice, sequence = running.choice, running.sequence
        if problem is not None:
            raise _error(problem, choice.num_output_tokens)
        delta = choice.append(token_id, logprobs)
        self._output_tokens += 1
        sequence.token_ids.append(token_id)
        if delta.finish_reason is not None:
            self._scheduler.finish(sequence)
            self._leave(running, delta)
        return [delta]

    def _tell_prompt(self, running: _Running, logits: torch.Tensor, chunk: Chunk) -> list[Delta]:
        """Note the log-probabilities of the prompt's tokens that follow those of a chunk."""
        choice, sequence = running.choice, running.sequence
        top = sequence.request.params.prompt_logprobs
        assert top is not None
        if chunk.start == 0:  # the first time, or again after a preemption
            choice.prompt_logprobs = [None]
        following = sequence.prompt[chunk.start + 1 : chunk.start + 1 + len(chunk.token_ids)]
        told = prompt_logprobs(logits[: len(following)], following, top)
        choice.prompt_logprobs += map(choice.told, told)
        sequence.wants_prompt_logits = len(choice.prompt_logprobs) < len(sequence.prompt)
        return []  # they travel with the first token

    def _leave(self, running: _Running, delta: Delta) -> None:
        """Forget a choice that has ended; its slot and blocks are given back."""
        choices = self._live[delta.request_id]
        del choices[running.choice.index]
        if not choices:
            del self._live[delta.request_id]
            delta.last = True

    def _outgrown(self, sequence: Sequence) -> Delta:
        logger.info(
            "request %s ends at %d tokens: it fills the whole KV pool", sequence.id, sequence.num_tokens
        )
        running = self._running(sequence)
        delta = running.choice.cut()
        self._leave(running, delta)
        return delta

    def _failed(self, running: _Running, error: RequestError) -> Delta:
        """The end of a request one of whose choices cannot go on."""
        choice, request_id = running.choice, running.sequence.id
        delta = Delta(
            request_id, [], choice.rest(), choice.index, finish_reason="error", error=error, last=True
        )
        self.abort(request_id)
        return delta


def _job(request_id: str, prompt: Any, params: SamplingParams | None) -> Job:
    return Job(id=request_id, prompt=prompt, params=params or SamplingParams())


def _chunk(sequence: Sequence, count: int) -> Chunk:
    start = sequence.num_computed_tokens
    token_ids = sequence.token_ids[start : start + count]
    if sequence.wants_prompt_logits:
        return Chunk(token_ids, start, sequence.block_table, count)
    return Chunk(token_ids, start, sequence.block_table, int(start + count == sequence.num_tokens))


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
