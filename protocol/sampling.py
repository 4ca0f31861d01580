"""How the next tokens are chosen, per request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from protocol.response_format import ResponseFormat

MAX_N = 128
"""Most choices of one prompt."""
MAX_LOGPROBS = 20
"""Most alternatives told a token, as in vLLM and OpenAI's API."""


_ID = re.compile("0|[1-9][0-9]{0,9}")


def _listed(value: Any) -> Any:
    """A list as a tuple: what is frozen holds nothing that can change."""
    return tuple(value) if isinstance(value, list) else value


def _one_or_several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _listed(value)


def _ids_as_numbers(value: Any) -> Any:
    """JSON writes the keys of an object as strings; each number in one way only, so that no two are the same."""
    if not isinstance(value, Mapping):
        return value
    return {
        int(key) if isinstance(key, str) and _ID.fullmatch(key) else key: item for key, item in value.items()
    }


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Text = Annotated[str, Field(min_length=1)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class SamplingParams(BaseModel):
    """Sampling parameters of one request, under the names vLLM and OpenAI use.

    Values are checked strictly: `"16"` or `true` for `max_tokens` is an error, not sixteen or one. `None` is the
    default, whatever the field. `docs/sampling.md` compares each with vLLM and transformers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    # How much
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens to generate. None: as many as the context holds. A larger number is cut to that."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """OpenAI's newer name of `max_tokens`; it wins where both are given."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Neither an end-of-sequence token nor a stop token is drawn before this many, and no stop string counts."""
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    """Choices per prompt."""

    # From logits to a distribution, in the order in which they apply
    allowed_token_ids: (
        Annotated[tuple[TokenId, ...], Field(min_length=1), BeforeValidator(_listed)] | None
    ) = None
    """Nothing but these is drawn."""
    bad_words: Annotated[tuple[_Text, ...], BeforeValidator(_one_or_several)] = ()
    """Never written, neither as they stand nor after a space: the last token of each is barred after the others."""
    logit_bias: Annotated[dict[TokenId, _Bias], BeforeValidator(_ids_as_numbers)] = {}
    """Added to the logits of these ids; -100 bars as a rule, 100 forces."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Logits of ids in prompt or output are divided by it where positive, multiplied where negative."""
    frequency_penalty: _Penalty = 0.0
    """Taken off the logit of an id once for every time it is in the output."""
    presence_penalty: _Penalty = 0.0
    """Taken off the logit of an id that is in the output."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 is greedy."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Keep this many likeliest tokens; 0 and -1 keep all."""
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of those, keep the smallest set of likeliest tokens whose probability reaches this; 0 keeps one."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of those, keep the ones at least this fraction as likely as the likeliest."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    """Draws depend on (seed, choice, position) alone. None: a seed made from the job id."""

    # The end
    stop: Annotated[tuple[_Text, ...], BeforeValidator(_one_or_several)] = ()
    """The output ends before the first of these texts that is completed in it."""
    stop_token_ids: Annotated[tuple[TokenId, ...], BeforeValidator(_listed)] = ()
    """The output ends with any of these ids, whose text is not shown."""
    include_stop_str_in_output: bool = False
    """Show the stop string, or the stop token's text, that ended the output."""
    ignore_eos: bool = False
    """Go on past an end-of-sequence token (benchmarks)."""

    # What is told
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | bool | None = None
    """Tell the log-probability of each sampled token, and of this many likeliest ones (True: of `top_logprobs`)."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """OpenAI's chat name of that number; it goes with `logprobs: true`."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """The same for the prompt's tokens, from the second on."""

    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Keep only this many of the prompt's last tokens."""
    response_format: ResponseFormat | None = None
    """What the output must look like."""

    @model_validator(mode="before")
    @classmethod
    def _none_is_the_default(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            return {name: value for name, value in values.items() if value is not None}
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, more than the {self.token_limit} of max_tokens"
            )
        if self.top_logprobs is not None and self.logprobs is not True:
            raise ValueError("top_logprobs goes with logprobs: true")
        return self

    @property
    def token_limit(self) -> int | None:
        """The most tokens asked for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to tell beside each sampled token; None: no log-probabilities."""
        if self.logprobs is True:
            return self.top_logprobs or 0
        return None if self.logprobs is None or self.logprobs is False else self.logprobs
