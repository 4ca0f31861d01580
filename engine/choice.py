"""One choice of a request: what happens to a token once it is drawn.

draw ---> append: text, stop string, end of sequence, length ---> Delta
  ^                |
  '---- rules -----'      what the output so far does to the next logits
"""

from __future__ import annotations

from typing import Any

from engine.interface import Delta, Request
from engine.output_text import OutputText
from engine.sampling import Draw, Logprobs, rules_for
from engine.text import Detokenizer, NoText
from protocol import FinishReason, TokenLogprob, TopLogprob


class Tokens:
    """The model's tokens: their text, which of them end a sequence, and how wide the logits are."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        """
        Args:
            tokenizer: a transformers tokenizer; None: no text, ids only.
            eos_token_ids: any of them ends an output.
            vocab_size: width of the logits.
        """
        self.eos = eos_token_ids
        self.vocab_size = vocab_size
        self.detokenizer: Detokenizer | NoText = NoText() if tokenizer is None else Detokenizer(tokenizer)

    def text(self, token_id: int) -> str:
        """One token's text by itself."""
        return self.detokenizer.token_text(token_id)


class Choice:
    """Owns the output of one choice: its text, its rules, its end."""

    def __init__(self, request: Request, index: int, tokens: Tokens) -> None:
        """
        Raises:
            RequestError: what an earlier attempt wrote does not follow the request's grammar.
        """
        params = request.params
        prompt_index = request.prompt_of(index)
        written = request.written[index].token_ids if request.written else ()
        self.index = index
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self._request = request
        self._tokens = tokens
        self._max_tokens = request.max_tokens[prompt_index]
        self._text = OutputText(tokens.detokenizer, params, written)
        # A complete grammar allows nothing but the end, so there it is an end.
        self._eos = frozenset() if params.ignore_eos and request.grammar is None else tokens.eos
        self._stop_ids = frozenset(params.stop_token_ids)
        self.draw = Draw(
            params,
            request.seed,
            index,
            len(written),
            rules_for(
                params,
                request.prompts[prompt_index],
                tokens.vocab_size,
                end_ids=self._eos | self._stop_ids,
                bad_words=request.bad_words,
                matcher=None if request.grammar is None else request.grammar.matcher(),
                output_token_ids=written,
            ),
        )
        self._last = written[-1] if written else None

    @property
    def num_output_tokens(self) -> int:
        return self.draw.position

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether this choice tells its prompt's; of several choices of one prompt the first does, once."""
        params = self._request.params
        return params.prompt_logprobs is not None and self.index % params.n == 0 and self._last is None

    @property
    def draws_its_last(self) -> bool:
        """Whether the token that is drawn next is its last in any case."""
        return self.draw.position + 1 >= self._max_tokens

    def over(self) -> Delta | None:
        """The end of a choice whose earlier attempt left nothing to compute."""
        if self._last is None:
            return None
        text, reason, stop_reason = self._end(self._last)
        return None if reason is None else self._delta([], text, reason, stop_reason)

    def append(self, token_id: int, logprobs: Logprobs | None) -> Delta:
        """Take in a drawn token.

        Raises:
            RequestError: the grammar does not go on with it.
        """
        draw = self.draw
        draw.position += 1
        if draw.rules is not None:
            draw.rules.push(token_id)
        self._last = token_id
        if token_id in self._eos or token_id in self._stop_ids:
            text = self._text.end(token_id)
        else:
            text = self._text.push(token_id)
        held, reason, stop_reason = self._end(token_id)
        delta = self._delta([token_id], text + held, reason, stop_reason)
        if logprobs is not None:
            delta.logprobs = [self.told(logprobs)]
        return delta

    def cut(self) -> Delta:
        """The end of a choice that cannot go on for want of room."""
        return self._delta([], self._text.flush(), "length", None)

    def rest(self) -> str:
        """What is held back of the text, for an end that is no ending."""
        return self._text.flush()

    def told(self, logprobs: Logprobs) -> TokenLogprob:
        """Log-probabilities of one token as they travel."""
        text = self._tokens.text
        return TokenLogprob(
            token_id=logprobs.token_id,
            token=text(logprobs.token_id),
            logprob=logprobs.logprob,
            rank=logprobs.rank,
            top_logprobs=[
                TopLogprob(token_id=token_id, token=text(token_id), logprob=logprob)
                for token_id, logprob in logprobs.top
            ],
        )

    def _end(self, last: int) -> tuple[str, FinishReason | None, str | int | None]:
        """What ends the output after this token, if anything does, and the text held back until then."""
        reason, stop_reason = self._reason(last)
        if reason != "length":
            return "", reason, stop_reason
        return self._text.flush(), *self._reason(last)  # what was held back may hold a stop string

    def _reason(self, last: int) -> tuple[FinishReason | None, str | int | None]:
        if last in self._eos:
            return "stop", None
        if last in self._stop_ids:
            return "stop", last
        if self._text.stopped is not None:
            return "stop", self._text.stopped
        return ("length" if self.num_output_tokens >= self._max_tokens else None), None

    def _delta(
        self, token_ids: list[int], text: str, reason: FinishReason | None, stop_reason: str | int | None
    ) -> Delta:
        delta = Delta(self._request.id, token_ids, text, self.index, reason, stop_reason)
        if self.prompt_logprobs:
            delta.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, []
        return delta
