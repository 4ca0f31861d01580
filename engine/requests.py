"""From a job to a request: the checks every engine makes before it takes a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.interface import Grammar, Request
from protocol import PRIORITIES, ErrorCode, Job, RequestError, SamplingParams


def check_model(job: Job, served: str) -> None:
    """Refuse a job that names another model than the one served.

    Raises:
        RequestError: `model_not_found`.
    """
    if job.model is not None and job.model != served:
        raise RequestError(
            ErrorCode.MODEL_NOT_FOUND, f"this queue serves {served}, the job asks for {job.model}"
        )


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, field: str = "prompt") -> None:
    """Refuse ids the model has no embedding for: on a GPU they would end the process, not the request.

    Raises:
        RequestError: `invalid_request`, naming the first such id and its position.
    """
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"{field}[{position}] is {token_id}: this model's token ids go from 0 to {vocab_size - 1}",
            )


def resolve_max_tokens(
    num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, field: str = "prompt"
) -> int:
    """How many tokens the answer may have: what is asked for, cut to what the context holds beside the prompt.

    Raises:
        RequestError: `invalid_request` for an empty prompt, `context_length_exceeded` where the prompt leaves no
            room for a single token.
    """
    if num_prompt_tokens == 0:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{field} is empty")
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{field} has {num_prompt_tokens} tokens and the context holds {max_model_len}, "
            "of which one must be left for the answer",
        )
    return room if max_tokens is None else min(max_tokens, room)


def build_request(
    job: Job,
    prompts: Sequence[Sequence[int]],
    vocab_size: int,
    max_model_len: int,
    bad_words: Iterable[tuple[int, ...]] = (),
    grammar: Grammar | None = None,
) -> Request:
    """Check the tokenized prompts and resolve the job's limits against the model.

    Args:
        prompts: Token ids of each prompt.
        bad_words: Token ids of each form of the barred words; forms that the model cannot write are left out.

    Raises:
        RequestError: a prompt is empty or too long, or an id anywhere lies outside the vocabulary.
    """
    params = job.params
    kept = [prompt[-(params.truncate_prompt_tokens or 0) :] for prompt in prompts]
    fields = ["prompt"] if len(kept) == 1 else [f"prompt[{index}]" for index in range(len(kept))]
    max_tokens = [
        resolve_max_tokens(len(prompt), params.token_limit, max_model_len, field)
        for field, prompt in zip(fields, kept, strict=True)
    ]
    for field, prompt in zip(fields, kept, strict=True):
        check_vocabulary(prompt, vocab_size, field)
    _check_params(params, vocab_size)
    return Request(
        id=job.id,
        prompts=tuple(map(tuple, kept)),
        params=params,
        seed=job.seed,
        max_tokens=tuple(max_tokens),
        priority=PRIORITIES.index(job.priority),
        bad_words=tuple(word for word in bad_words if max(word) < vocab_size),
        grammar=grammar,
    )


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    check_vocabulary(params.stop_token_ids, vocab_size, "stop_token_ids")
    check_vocabulary(params.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    for token_id in params.logit_bias:
        if token_id >= vocab_size:
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"logit_bias is given for {token_id}: this model's token ids go from 0 to {vocab_size - 1}",
            )
