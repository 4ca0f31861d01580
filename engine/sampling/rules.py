"""What one choice keeps to know how its parameters and its output so far change its next logits.

request --> rules_for --> Rules --> adjust.apply: this step's masks, bars, bias, penalties
                            ^
             push(token) ---'    O(1): a count, a tail, the grammar's place
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from engine.interface import Matcher
from engine.sampling.bad_words import BadWords, Ids
from engine.sampling.history import History
from protocol import SamplingParams

Words = npt.NDArray[np.int32]
"""A bit an id: bit `i % 32` of word `i // 32`."""


class Rules:
    """The rules of one choice. Every token of its output is to be pushed."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_token_ids: Sequence[int],
        end_ids: Iterable[int],
        bad_words: BadWords,
        matcher: Matcher | None,
    ) -> None:
        self.penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.history = _history(params, prompt_token_ids)
        self.bias_ids: Ids = np.array(list(params.logit_bias), dtype=np.int64)
        self.bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self.matcher = matcher
        self._allowed = _bits(params.allowed_token_ids, vocab_size)
        self._bad_words = bad_words
        self._end_ids: Ids = np.array(sorted(end_ids), dtype=np.int64)
        self._min_left = params.min_tokens

    def push(self, token_id: int) -> None:
        """Take note of a token of the output.

        Raises:
            RequestError: the grammar does not allow it here.
        """
        self._min_left -= 1
        if self.history is not None:
            self.history.push(token_id)
        self._bad_words.push(token_id)
        if self.matcher is not None:
            self.matcher.push(token_id)

    @property
    def has_mask(self) -> bool:
        return self.matcher is not None or self._allowed is not None

    def write_mask(self, mask: Words) -> None:
        """Write the ids that grammar and allow-list leave."""
        mask[:] = -1
        if self.matcher is not None:
            self.matcher.allowed(mask)
        if self._allowed is not None:
            mask &= self._allowed

    def bars(self) -> list[Ids]:
        """Ids that may not come next beside what the mask says."""
        ends = [self._end_ids] if self._min_left > 0 else []
        return [*ends, *self._bad_words.barred()]


def rules_for(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    vocab_size: int,
    *,
    end_ids: frozenset[int],
    bad_words: Sequence[tuple[int, ...]],
    matcher: Matcher | None,
    output_token_ids: Sequence[int] = (),
) -> Rules | None:
    """The rules of a new choice, or of one that goes on after an earlier attempt.

    Args:
        params: `logit_bias` and `allowed_token_ids` name ids below `vocab_size` only.
        prompt_token_ids: for the repetition penalty.
        vocab_size: width of the logits.
        end_ids: ids that end an output; none is drawn before `min_tokens` tokens.
        bad_words: token ids of each form of each barred word.
        matcher: at the beginning of the output.
        output_token_ids: what an earlier attempt wrote.

    Returns:
        None where nothing ever changes the logits.

    Raises:
        RequestError: the grammar does not allow what was written.
    """
    ends = [token_id for token_id in end_ids if token_id < vocab_size]
    words = [word for word in bad_words if word and max(word) < vocab_size]
    min_left = params.min_tokens - len(output_token_ids)
    plain = params.repetition_penalty == 1 and params.frequency_penalty == params.presence_penalty == 0
    plain = plain and params.allowed_token_ids is None and not params.logit_bias and not words
    if plain and matcher is None and (min_left <= 0 or not ends):
        return None
    rules = Rules(params, vocab_size, prompt_token_ids, ends, BadWords(words), matcher)
    for token_id in output_token_ids:
        rules.push(token_id)
    return rules


def _history(params: SamplingParams, prompt_token_ids: Sequence[int]) -> History | None:
    if params.repetition_penalty != 1:
        return History(prompt_token_ids)
    return History(()) if params.frequency_penalty or params.presence_penalty else None


def _bits(token_ids: Sequence[int] | None, vocab_size: int) -> Words | None:
    if token_ids is None:
        return None
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
