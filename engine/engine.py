"""The engine: requests in, tokens out, one forward pass a step.

    step   schedule --> runner.forward --> sample --> append, detokenize, finish --> deltas
              ^                                                 |
              '---- blocks and slots of what ended or left -----'

A request is admitted at the first step that has room for it and leaves in the step that ends it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from engine.blocks import BlockPool
from engine.bulk import Prompt, generate
from engine.interface import Chunk, Delta, EngineStats, PromptEncoder, Request, Runner
from engine.requests import build_request, check_model
from engine.sampling import Draw, sample
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.slots import SlotAllocator
from engine.text import Detokenizer, NoText, TextStream
from protocol import ErrorCode, Fingerprint, FinishReason, Job, RequestError, Result, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Live:
    """A request that waits or runs."""

    sequence: Sequence
    text: TextStream | NoText


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
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 512,
        admission: str = "first-fit",
    ) -> None:
        """
        Args:
            runner: computes chunks; its KV blocks are ours to give out.
            tokenizer: decodes the output (a transformers tokenizer); None: no text, ids only.
            prompts: renders and tokenizes.
            fingerprint: the model's; a job that names another model is refused.
            eos_token_ids: any of them ends an output.
            max_num_seqs: sequences that run at once; cut to `max_num_batched_tokens`.
            max_num_batched_tokens: tokens a step computes at most. More than 512 bought nothing on a CPU.
            admission: `first-fit`, `best-fit` or `priority`, see `engine.slots`.

        Raises:
            ValueError: no such admission policy, or a limit below 1.
        """
        self._runner = runner
        self._prompts = prompts
        self._fingerprint = fingerprint
        self._eos = frozenset(eos_token_ids)
        self._stream = Detokenizer(tokenizer).stream if tokenizer is not None else NoText
        blocks = BlockPool(runner.num_kv_blocks, runner.block_size)
        slots = SlotAllocator(min(max_num_seqs, max_num_batched_tokens), admission)
        self._scheduler = Scheduler(blocks, slots, max_num_batched_tokens)
        self._live: dict[str, _Live] = {}
        self._ended: dict[str, Delta] = {}
        """Resumed requests that were at their end already; their delta goes out with the next step."""
        self._steps = self._prompt_tokens = self._output_tokens = self._bulk_calls = 0
        if runner.max_model_len > blocks.capacity:
            logger.warning(
                "the KV pool holds %d tokens, less than one sequence of max_model_len %d: longer ones end early",
                blocks.capacity,
                runner.max_model_len,
            )

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    @property
    def max_num_seqs(self) -> int:
        return self._scheduler.slots.num_slots

    def prepare(self, job: Job) -> Request:
        """Render, tokenize and check a job; safe on any thread.

        Raises:
            RequestError: the job can never run here.
        """
        check_model(job, self._fingerprint.name)
        token_ids = self._prompts.encode(job)
        return build_request(job, token_ids, self._runner.vocab_size, self._runner.max_model_len)

    def add(self, request: Request) -> None:
        """Queue a request; it may run from the next step on.

        Raises:
            RequestError: its prompt can never fit the KV pool, or its id is already here.
        """
        if request.id in self._live or request.id in self._ended:
            raise RequestError(
                ErrorCode.INVALID_REQUEST, f"a request with the id {request.id} is already here"
            )
        ended = self._ended_before(request)
        if ended is not None:
            self._ended[request.id] = ended
            return
        sequence = self._scheduler.add(request)
        self._live[request.id] = _Live(sequence, self._stream(request.output_token_ids))

    def abort(self, request_id: str) -> bool:
        """Drop a request in any state; no delta follows. False if it is not here.

        During a forward pass it is safe too: blocks are handed out again at the next step only.
        """
        live = self._live.pop(request_id, None)
        if live is None:
            return self._ended.pop(request_id, None) is not None
        self._scheduler.remove(live.sequence)
        return True

    def has_work(self) -> bool:
        return bool(self._live) or bool(self._ended)

    def step(self) -> list[Delta]:
        """Run one step.

        Raises:
            Exception: whatever the forward pass raises; the state is not to be used after it.
        """
        if not self.has_work():
            return []
        deltas = list(self._ended.values())
        self._ended.clear()
        plan = self._scheduler.schedule()
        deltas += [self._outgrown(sequence) for sequence in plan.outgrown]
        if plan.chunks:
            deltas += self._compute(plan.chunks)
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
            output_tokens=self._output_tokens,
            preemptions=scheduler.num_preemptions,
        )

    def check_integrity(self) -> None:
        """Check that no block or slot is owned twice or lost. Runs by itself whenever the engine becomes idle.

        Raises:
            IntegrityError: the books do not balance.
        """
        self._scheduler.check_integrity()

    def generate(self, prompts: Seq[Prompt], params: SamplingParams | None = None) -> list[Result]:
        """Answer prompts in this process; see `engine.bulk.generate`."""
        self._bulk_calls += 1
        return generate(self, prompts, params, name=f"generate-{self._bulk_calls}")

    def _compute(self, planned: list[tuple[Sequence, int]]) -> list[Delta]:
        """One forward pass, and one token for each sequence that has caught up."""
        drawing = [sequence for sequence, count in planned if count == sequence.num_uncomputed_tokens]
        logits = self._runner.forward([_chunk(sequence, count) for sequence, count in planned])
        for sequence, count in planned:
            start = sequence.num_computed_tokens
            self._prompt_tokens += max(0, min(count, len(sequence.request.prompt_token_ids) - start))
            if sequence.slot is not None:  # else aborted while the pass ran
                sequence.num_computed_tokens += count
        if not drawing:
            return []
        token_ids, usable = sample(logits, [_draw(sequence) for sequence in drawing])
        return [
            self._append(sequence, token_id) if good else self._invalid(sequence)
            for sequence, token_id, good in zip(drawing, token_ids, usable, strict=True)
            if sequence.slot is not None
        ]

    def _append(self, sequence: Sequence, token_id: int) -> Delta:
        self._output_tokens += 1
        sequence.token_ids.append(token_id)
        text = self._live[sequence.id].text
        reason = self._finish_reason(sequence.request, token_id, sequence.num_output_tokens)
        delta = Delta(sequence.id, [token_id], "" if reason == "stop" else text.push(token_id))
        if reason is not None:
            delta.text += text.flush()
            delta.finish_reason = reason
            self.abort(sequence.id)
        return delta

    def _finish_reason(self, request: Request, last: int, num_output_tokens: int) -> FinishReason | None:
        if last in self._eos and not request.params.ignore_eos:
            return "stop"
        return "length" if num_output_tokens >= request.max_tokens else None

    def _outgrown(self, sequence: Sequence) -> Delta:
        logger.info(
            "request %s ends at %d tokens: it fills the whole KV pool", sequence.id, sequence.num_tokens
        )
        return Delta(sequence.id, [], self._live.pop(sequence.id).text.flush(), finish_reason="length")

    def _invalid(self, sequence: Sequence) -> Delta:
        error = RequestError(
            ErrorCode.INVALID_LOGITS,
            f"output token {sequence.num_output_tokens} cannot be drawn: its logits are NaN or infinite",
        )
        text = self._live[sequence.id].text.flush()
        self.abort(sequence.id)
        return Delta(sequence.id, [], text, finish_reason="error", error=error)

    def _ended_before(self, request: Request) -> Delta | None:
        """The end of a resumed request whose earlier attempt left nothing to compute, or grew beyond this pool."""
        output = request.output_token_ids
        if not output:
            return None
        reason = self._finish_reason(request, output[-1], len(output))
        if reason is not None:
            return Delta(
                request.id, [], "", finish_reason=reason
            )  # the last token's delta carried all the text
        if len(request.prompt_token_ids) + len(output) <= self._scheduler.blocks.capacity:
            return None
        return Delta(request.id, [], self._stream(output).flush(), finish_reason="length")


def _chunk(sequence: Sequence, count: int) -> Chunk:
    start = sequence.num_computed_tokens
    token_ids = sequence.token_ids[start : start + count]
    return Chunk(token_ids, start, sequence.block_table, start + count == sequence.num_tokens)


def _draw(sequence: Sequence) -> Draw:
    request = sequence.request
    return Draw(request.params, request.seed, 0, sequence.num_output_tokens)
