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
from typing import NamedTuple

from engine.stop import StopStrings, stop_strings
from engine.text import Detokenizer, NoText
from protocol import SamplingParams

_SHOWN, _HIDDEN = "s", "h"


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
        "_reading",
        "_reading_all",
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
        self._reading = _Reading(stop_strings(params.stop)) if params.stop else None
        self._reading_all: _Reading | None = None
        """Reads hidden tokens too, from the first one on."""
        self._held = ""
        """Final text that is not sent."""
        self._num_tokens = 0
        for token_id in token_ids:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Text that is now safe to send."""
        text = self._stream.push(token_id)
        if self._reading is None:
            return text
        self._num_tokens += 1
        if token_id in self._hidden_ids:
            self._reading_all = self._reading_all or self._reading.copy()
            hidden = self._detokenizer.token_text(token_id)
            return self._release("", self._reading_all.read(hidden, _HIDDEN, self._counts))
        return self._release(text, self._read(text)) if text else ""

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
        if self._reading is None:
            return text
        sent = self._release(text, self._read(text))
        held, self._held = self._held, ""
        return sent + held

    @property
    def _counts(self) -> bool:
        """Whether a stop string that is completed now counts."""
        return self._num_tokens > self._params.min_tokens

    @property
    def _readings(self) -> list[_Reading]:
        return [reading for reading in (self._reading, self._reading_all) if reading is not None]

    def _read(self, text: str) -> _Found | None:
        """The stop string in either reading that is completed first; of two at once, the one that begins first."""
        found = [reading.read(text, _SHOWN, self._counts) for reading in self._readings]
        return min(
            filter(None, found), key=lambda one: (one.end, -one.num_shown, -len(one.stop)), default=None
        )

    def _release(self, text: str, found: _Found | None) -> str:
        """What of the held-back and the new text can go out."""
        if found is None:
            text = self._held + text
            cut = len(text) - max(reading.num_shown for reading in self._readings)
            self._held = text[cut:]
            return text[:cut]
        text = self._held + text[: found.end]
        self._held = ""
        self.stopped = found.stop
        return text if self._params.include_stop_str_in_output else text[: len(text) - found.num_shown]


class _Found(NamedTuple):
    """A stop string that was completed in a reading."""

    end: int
    """Characters of the piece up to the end of it."""
    num_shown: int
    """How many of its characters are shown."""
    stop: str


class _Reading:
    """A text as it has been read for stop strings so far, with the characters that it holds back."""

    __slots__ = ("_marks", "_place", "_stops")

    def __init__(self, stops: StopStrings, place: int = 0, marks: str = "") -> None:
        self._stops = stops
        self._place = place
        self._marks = marks
        """Which of the last characters are shown, for as many as can become part of a stop string."""

    def copy(self) -> _Reading:
        return _Reading(self._stops, self._place, self._marks)

    @property
    def num_shown(self) -> int:
        """Shown characters that are to be held back."""
        return self._marks.count(_SHOWN)

    def read(self, text: str, mark: str, counts: bool) -> _Found | None:
        """Read on, up to the first stop string that is completed, if they count."""
        match = None
        if counts:
            self._place, match = self._stops.search(self._place, text)
        else:
            self._place = self._stops.skip(self._place, text)
        if match is not None:
            marks = self._marks + mark * match.end
            return _Found(match.end, marks[-len(match.stop) :].count(_SHOWN), match.stop)
        marks = self._marks + mark * len(text)
        self._marks = marks[len(marks) - self._stops.held(self._place) :]
        return None
