"""How much a job may have told of it.

Log-probabilities are the one part of an answer that can be hundreds of times its text. Those of a prompt travel as
one event and stand in the log and once more in the result; parent, server and every reader hold them whole. Measured
on two busy cores for a prompt of 100,000 tokens, with the time in which the parent can do nothing else:

    alternatives   event    parent    its memory
          0        10 MB     1.5 s      0.4 GB
          5        41 MB     7 s        1.2 GB
         20       137 MB    27 s        4.0 GB     most of a lease

Those of the output come a token at a time, so only the result (a third of that time) is as large.
"""

from __future__ import annotations

from engine.interface import Request
from protocol import ErrorCode, RequestError
from protocol.volume import ALTERNATIVE_BYTES, LOGPROB_BYTES, MOST_LOG_BYTES

MOST_PROMPT_BYTES = 64 << 20


def check_volume(request: Request) -> None:
    """Refuse a job whose log-probabilities may take more than a worker can tell.

    Raises:
        RequestError: `invalid_request`, with the numbers.
    """
    params = request.params
    if params.prompt_logprobs is not None:
        prompt_tokens = request.num_prompt_tokens
        _check("prompt_logprobs", params.prompt_logprobs, prompt_tokens, "prompt", MOST_PROMPT_BYTES)
    if params.num_logprobs is not None:
        output_tokens = params.n * sum(request.max_tokens)
        _check("logprobs", params.num_logprobs, output_tokens, "output", MOST_LOG_BYTES)


def _check(name: str, alternatives: int, num_tokens: int, of: str, most: int) -> None:
    size = num_tokens * (LOGPROB_BYTES + alternatives * ALTERNATIVE_BYTES)
    if size > most:
        how_many = "max_tokens for all choices together" if of == "output" else "all prompts together"
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"{name} is {alternatives} for {num_tokens:,} {of} tokens ({how_many}), which may take "
            f"{size // 10**6:,} MB: ask for fewer, at most {most // 10**6:,} MB can be told",
        )
