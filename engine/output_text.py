"""The text of one output as the engine sends it: final, without hidden tokens, and never with part of a stop string.

    token --> stream: whole characters --> stop strings: held back while they may begin --> text that is safe to send

Where an output ends:

- A stop string counts in generated text only, once it is completed in it, wherever in a token. Which of several, see
  `engine.stop`. The text is cut before it, or after it with `include_stop_str_in_output`; the rest of its last token
  is dropped.
- `min_tokens` as in vLLM: a stop string does not count where the text that completes it came from the first
  `min_tokens` tokens. One that is completed later counts, also if it begins in them.
- Special tokens that `skip_special_tokens` hides count by their text, as if they were shown: an output ends where it
  would with all of them shown. It ends as well where the text without them completes a stop string, so that nobody
  reads one. A hidden token's text stands where the token does; a character that was incomplete at it comes after it.
- The token that ends an output (end of sequence, or a stop token id) is not shown and completes no stop string. With
  `include_stop_str_in_output` it is a token like all others: shown, unless it is special and those are hidden.

    stop ["<file_sep>"]     Hi | there | <file_sep> | Hello     hidden: "Hi there", stopped by "<file_sep>"
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.stop import Found, StopSearch
from engine.text import Detokenizer, NoText
from protocol import SamplingParams


class OutputText:
    """`push` each token of an output, `end` it with the token that ends it, or `flush` it where it is cut off.

    Joined, what these return is the output's text. Once `stopped` is set, nothing more is to come.
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_hidden_ids",
        "_num_tokens",
        "_params",
        "_search",
        "_stream",
        "stopped",
    )

    def __init__(
        self, detokenizer: Detokenizer | NoText, params: SamplingParams, token_ids: Iterable[int] = ()
    ) -> None:
        """
        Args:
            detokenizer: the tokenizer's.
            params: `stop`, `include_stop_str_in_output`, `min_tokens` and `skip_special_tokens` are read.
            token_ids: already written, their text already sent; the next `push` goes on without a seam.
        """
        self.stopped: str | None = None
        """The stop string that was completed."""
        self._detokenizer = detokenizer
        self._params = params
        self._stream = detokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        self._hidden_ids = detokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        self._search = StopSearch(params.stop) if params.stop else None
        self._held = ""
        """Final text that is not sent: it may belong to a stop string."""
        self._num_tokens = 0
        for token_id in token_ids:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Text that is now safe to send."""
        text = self._stream.push(token_id)
        search = self._search
        if search is None:
            return text
        self._num_tokens += 1
        if token_id in self._hidden_ids:
            hidden = self._detokenizer.token_text(token_id)
            return self._send(search, text, search.hide(hidden, self._stops_count))
        return self._send(search, text, search.show(text, self._stops_count)) if text else ""

    def end(self, token_id: int) -> str:
        """The rest, with the token that ends the output (end of sequence, or a stop token id)."""
        if self._params.include_stop_str_in_output and token_id not in self._hidden_ids:
            return self.push(token_id) + self.flush()
        self._num_tokens += 1
        return self.flush()

    def flush(self) -> str:
        """The rest, incomplete characters as U+FFFD; it may complete a stop string."""
        if self.stopped is not None:
            return ""
        text = self._stream.flush()
        if self._search is None:
            return text
        sent = self._send(self._search, text, self._search.show(text, self._stops_count))
        held, self._held = self._held, ""
        return sent + held

    @property
    def _stops_count(self) -> bool:
        return self._num_tokens > self._params.min_tokens

    def _send(self, search: StopSearch, text: str, found: Found | None) -> str:
        """What can go out of the text held back and the text that followed."""
        if found is None:
            text = self._held + text
            cut = len(text) - search.num_held
            self._held = text[cut:]
            return text[:cut]
        text = self._held + text[: found.end]
        self._held = ""
        self.stopped = found.stop
        return text if self._params.include_stop_str_in_output else text[: len(text) - found.num_shown]
