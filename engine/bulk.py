"""Many prompts through one engine in this process, without a queue."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from engine.interface import Delta, EngineCore
from protocol import (
    Choice,
    ErrorCode,
    Job,
    JobError,
    MillstreamError,
    RequestError,
    Result,
    SamplingParams,
    Usage,
    describe_validation,
)

Prompt = Job | str | list[int] | list[str] | list[list[int]]
"""A job, or a prompt for one: text or token ids, or several of either."""


def generate(
    engine: EngineCore,
    prompts: Sequence[Prompt],
    params: SamplingParams | None = None,
    name: str = "generate",
) -> list[Result]:
    """Answer prompts and wait for all of them.

    Args:
        engine: an idle engine.
        prompts: jobs with ids of their own, or plain prompts.
        params: for the plain prompts; a job has its own.
        name: plain prompt number i gets the id `<name>-<i>`, which is also what its draws are seeded by, unless
            `params` has a seed.

    Returns:
        One result a prompt, in order. One that cannot be answered has `state` "failed" and an `error`.

    Raises:
        MillstreamError: the engine is at work for somebody else, two jobs have one id, or `prompts` is no list.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        # A text would be as many prompts as it has characters.
        kind = "a text" if isinstance(prompts, str) else type(prompts).__name__
        raise MillstreamError(f"generate takes a list of prompts, not {kind}: put it in a list")
    if engine.has_work():
        raise MillstreamError("generate needs an engine that is idle")
    ids = [prompt.id if isinstance(prompt, Job) else f"{name}-{i}" for i, prompt in enumerate(prompts)]
    answers = {job_id: _Answer(job_id, engine.fingerprint.name) for job_id in ids}
    if len(answers) < len(ids):
        raise MillstreamError("two of the jobs have the same id")
    try:
        for job_id, prompt in zip(ids, prompts, strict=True):
            answers[job_id].start(engine, prompt, params or SamplingParams())
        while engine.has_work():
            for delta in engine.step():
                answers[delta.request_id].take(delta)
    finally:
        for job_id in ids:  # nothing to drop unless interrupted
            engine.abort(job_id)
    return [answers[job_id].result() for job_id in ids]


class _Answer:
    """What has come back for one job."""

    def __init__(self, job_id: str, model: str) -> None:
        self._job_id = job_id
        self._model = model
        self._seed: int | None = None
        self._num_prompt_tokens = 0
        self._deltas: list[list[Delta]] = []
        """Of each choice."""
        self._error: RequestError | None = None

    def start(self, engine: EngineCore, prompt: Prompt, params: SamplingParams) -> None:
        try:
            job = prompt if isinstance(prompt, Job) else Job(id=self._job_id, prompt=prompt, params=params)
            self._seed = job.seed
            request = engine.prepare(job)
            self._num_prompt_tokens = request.num_prompt_tokens
            engine.add(request)
            self._deltas = [[] for _ in range(request.num_choices)]
        except ValidationError as error:
            self._error = RequestError(ErrorCode.INVALID_REQUEST, describe_validation(error))
        except RequestError as error:
            self._error = error

    def take(self, delta: Delta) -> None:
        self._deltas[delta.choice].append(delta)
        self._error = delta.error or self._error

    def result(self) -> Result:
        choices = [_choice(index, deltas) for index, deltas in enumerate(self._deltas)]
        error = self._error
        return Result(
            id=self._job_id,
            state="failed" if error else "succeeded",
            choices=choices,
            usage=Usage(
                prompt_tokens=self._num_prompt_tokens,
                completion_tokens=sum(len(choice.token_ids) for choice in choices),
            ),
            error=JobError(code=error.code, message=error.message) if error else None,
            model=self._model,
            seed=self._seed,
        )


def _choice(index: int, deltas: list[Delta]) -> Choice:
    """A choice from all that was made of it; one that its request's end has cut off ends by "error"."""
    last = deltas[-1] if deltas else None
    return Choice(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        finish_reason=last.finish_reason or "error" if last else "error",
        stop_reason=last.stop_reason if last else None,
        logprobs=[told for delta in deltas for told in delta.logprobs or ()] or None,
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None),
    )
