"""From a job to a request: the checks every engine makes before it takes a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from engine.interface import Request
from protocol import PRIORITIES, ErrorCode, Job, RequestError


def check_model(job: Job, served: str) -> None:
    """Refuse a job that names another model than the one served.

    Raises:
        RequestError: `model_not_found`.
    """
    if job.model is not None and job.model != served:
        raise RequestError(
            ErrorCode.MODEL_NOT_FOUND, f"this queue serves {served}, the job asks for {job.model}"
        )


def check_vocabulary(token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids the model has no embedding for: on a GPU they would end the process, not the request.

    Raises:
        RequestError: `invalid_request`, naming the first such id and its position.
    """
    if token_ids and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"prompt[{position}] is {token_id}: this model's token ids go from 0 to {vocab_size - 1}",
            )


def resolve_max_tokens(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """How many tokens the answer may have: what is asked for, cut to what the context holds beside the prompt.

    Raises:
        RequestError: `invalid_request` for an empty prompt, `context_length_exceeded` where the prompt leaves no
            room for a single token.
    """
    if num_prompt_tokens == 0:
        raise RequestError(ErrorCode.INVALID_REQUEST, "prompt is empty")
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {num_prompt_tokens} tokens and the context holds {max_model_len}, "
            "of which one must be left for the answer",
        )
    return room if max_tokens is None else min(max_tokens, room)


def build_request(job: Job, prompt_token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> Request:
    """Check a tokenized prompt and resolve the job's limits against the model.

    Raises:
        RequestError: the prompt is empty, too long, or holds ids outside the vocabulary.
    """
    max_tokens = resolve_max_tokens(len(prompt_token_ids), job.params.max_tokens, max_model_len)
    check_vocabulary(prompt_token_ids, vocab_size)
    return Request(
        id=job.id,
        prompt_token_ids=tuple(prompt_token_ids),
        params=job.params,
        seed=job.seed,
        max_tokens=max_tokens,
        priority=PRIORITIES.index(job.priority),
    )
