"""The engine: requests in, tokens out, one forward pass a step.

    prepare --> add --> step, step, step ... --> deltas          what a step does: `engine.loop`

A request is admitted at the first step that has room for it; each of its choices leaves in the step that ends it.
What goes wrong with one request (logits that are no numbers, rules that leave nothing to draw, a fault in its text)
ends that request and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from engine.blocks import BlockPool
from engine.breaker import Breaker
from engine.bulk import Prompt, generate
from engine.choice import Choice, Tokens
from engine.interface import Delta, EngineStats, Grammar, GrammarCompiler, PromptEncoder, Request, Runner
from engine.limits import Given, check, slots_and_budget
from engine.loop import Loop
from engine.options import check_words
from engine.pace import Pace
from engine.requests import build_request, check_model
from engine.running import Running
from engine.scheduler import Scheduler
from engine.slots import SlotAllocator
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
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_step_ms: float | None = None,
        admission: str = "first-fit",
        overlap: bool | None = None,
    ) -> None:
        """
        Args:
            runner: computes chunks; its KV blocks are ours to give out.
            tokenizer: decodes the output (a transformers tokenizer); None: no text, ids only.
            prompts: renders and tokenizes.
            fingerprint: the model's; a job that names another model is refused.
            eos_token_ids: any of them ends an output.
            grammars: compiles what `response_format` asks for; None: such jobs are refused.
            max_num_seqs: sequences that run at once; None: 128, fewer where blocks or tokens a step are fewer.
            max_num_batched_tokens: tokens a step computes at most; None: 512, which more bought nothing over on a
                CPU, or as many as there are slots.
            max_step_ms: milliseconds a step should take at most: prompts are computed in smaller chunks, and
                nobody is admitted while the decodes alone take longer. None: no bound.
            admission: `first-fit`, `best-fit` or `priority`, see `engine.slots`.
            overlap: launch each step before the tokens of the one before are read, see `engine.loop`. None: where
                the runner does not wait for its device, as on a GPU.

        Raises:
            OptionRefused: a limit below 1, less than a token a step for each slot, or no such admission policy.
        """
        check_words({"admission": admission, "overlap": overlap})
        check(Given(max_num_seqs, max_num_batched_tokens, max_step_ms))
        num_slots, budget = slots_and_budget(max_num_seqs, max_num_batched_tokens, runner.num_kv_blocks)
        self._runner = runner
        self._prompts = prompts
        self._grammars = grammars
        self._fingerprint = fingerprint
        self._tokens = Tokens(tokenizer, frozenset(eos_token_ids), runner.vocab_size)
        blocks = BlockPool(runner.num_kv_blocks, runner.block_size)
        self._scheduler = Scheduler(blocks, SlotAllocator(num_slots, admission), budget)
        self._loop = Loop(
            runner,
            self._scheduler,
            Pace(budget, max_step_ms),
            Breaker(num_slots, budget),
            overlap=runner.is_asynchronous if overlap is None else overlap,
        )
        self._ended: dict[str, list[Delta]] = {}
        """Of resumed requests: choices that were at their end already. They are told with the next step."""
        self._bulk_calls = 0
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
        if request.id in self._loop.roster or request.id in self._ended:
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
            self._loop.roster.add(request.id, map(Running, going, sequences))
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
        return self._loop.drop(request_id) or ended

    def has_work(self) -> bool:
        return bool(self._loop.roster) or bool(self._ended)

    def step(self) -> list[Delta]:
        """Run one step.

        Returns:
            What it made, or with overlap the one before: at most one token a choice. Empty when there is no work, and
            while prompts are computed.

        Raises:
            DeviceLost: the device fails again and again; the state is not to be used after it.
            Exception: whatever else the forward pass raises; as above.
        """
        if not self.has_work():
            return []
        deltas = [delta for ended in self._ended.values() for delta in ended]
        self._ended.clear()
        deltas += self._loop.step()
        if not self._loop.roster:
            self.check_integrity()
        return deltas

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def check_integrity(self) -> None:
        """Check that no block or slot is owned by too many or lost. Runs by itself whenever the engine becomes idle.

        Raises:
            IntegrityError: the books do not balance.
        """
        self._scheduler.check_integrity()

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[Result]:
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


def _job(request_id: str, prompt: Any, params: SamplingParams | None) -> Job:
    return Job(id=request_id, prompt=prompt, params=params or SamplingParams())
