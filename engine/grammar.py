"""Structured output: which tokens may come next, so that a finished output is what `response_format` asks for.

    compile(response_format) -> grammar        any thread; kept by content
    grammar.matcher() -> matcher               one a choice
    matcher.allowed(mask); matcher.push(id)    engine thread, each step

    format        notation                                           the whole output is
    json_object   -                                                  a JSON object
    json_schema   JSON Schema, Draft 2020-12; see json_schema.py     JSON that validates
    regex         what Python's `re` and Rust share; see regex.py    matched by `re.fullmatch`
    choice        -                                                  one of the texts
    grammar       llguidance's Lark, or llama.cpp's GBNF             derived from `start` (Lark), `root` (GBNF)

JSON may be compact or spread over lines: at each place where whitespace may stand, one space, or one line feed and up
to 20 spaces. Characters in strings are written as they are, never as \\uXXXX, so a key has one spelling only.

The library is llguidance, because it refuses what it cannot keep. Of the 56 schemas of `bench/grammar.py`, xgrammar
0.2.9 takes all and lets wrong outputs through for 21 (`not`, `if`, `uniqueItems`, `multipleOf`, `allOf`, length with
pattern); llguidance 1.9.1 refuses 12 and is wrong for 3, which json_schema.py mends: 14 refused, none wrong. Of the
wrong instances in JSON-Schema-Test-Suite's Draft 2020-12, xgrammar takes 293 of 487, this 0 of 235. A schema compiles
in 7 ms (6 of them on trial) against 56 ms; 64 masks take 2.9 ms against 0.7 (all on a busy machine, 49,152 tokens).
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from engine import json_schema, regex
from engine.grammar_trial import limits, try_to_compile
from engine.trial import Trial, TrialFailed
from protocol import ErrorCode, RequestError, ResponseFormat
from protocol.response_format import (
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    TextFormat,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_KEPT = 256
"""Compiled grammars kept; the one used longest ago goes."""
MAX_BYTES = 65_536
"""Of a schema, a grammar, an expression, or all choices together, in UTF-8."""
_MASK_SECONDS = 0.25
"""CPU time that the first mask may take."""
_GRAMMARS_FAULT = (ValueError, RecursionError)
"""These say that a grammar cannot be compiled, now and ever."""
_JSON = {
    "whitespace_pattern": r"\x20|\n\x20{0,20}",
    "json_allowed_escapes": 'nrbtf\\"',
    "lenient": False,
    "coerce_one_of": False,
}


class Grammars:
    """Compiles for one model. Costs nothing until something is compiled; the library is imported then."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """
        Args:
            tokenizer: a transformers tokenizer with a fast backend.
            vocab_size: width of the logits. Ids that the tokenizer has no token for are never allowed.
            eos_token_ids: every id that ends a sequence.
        """
        self._vocabulary = _Vocabulary(tokenizer, vocab_size, eos_token_ids)
        self._trial = Trial("engine.grammar_trial")
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Future[CompiledGrammar]] = OrderedDict()

    def compile(self, response_format: ResponseFormat) -> CompiledGrammar | None:
        """The grammar of a format, or None for text. Threads that ask for the same wait for one compilation.

        Raises:
            RequestError: it is too large or cannot be compiled, or the tokenizer or the library cannot be used; or it
                could not be tried (`device_error`: that may pass).
        """
        if isinstance(response_format, TextFormat):
            return None
        try:
            source = _source(response_format)
            size = len(source.encode())
            if size > MAX_BYTES:
                raise ValueError(f"too large: {size:,} bytes, at most {MAX_BYTES:,}")
            return self._find(response_format, source)
        except _GRAMMARS_FAULT as error:
            message = f"response_format.{response_format.type}: {_reason(str(error))}"
            raise RequestError(ErrorCode.INVALID_REQUEST, message) from None
        except TrialFailed as error:
            message = f"response_format.{response_format.type}: {error}"
            raise RequestError(ErrorCode.DEVICE_ERROR, message) from error

    def _find(self, response_format: ResponseFormat, source: str) -> CompiledGrammar:
        key = (response_format.type, source)
        with self._lock:
            kept = self._kept.get(key)
            if ours := kept is None:
                kept = self._kept[key] = Future()
            self._kept.move_to_end(key)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        if ours:
            try:
                kept.set_result(self._make(response_format))
            except BaseException as error:
                if not isinstance(error, _GRAMMARS_FAULT):
                    self._forget(key, kept)
                kept.set_exception(error)
                raise
        failure = kept.exception()
        if failure is not None:
            # A new one each time: raising the same one again would grow its traceback.
            kind = ValueError if isinstance(failure, _GRAMMARS_FAULT) else TrialFailed
            raise kind(str(failure))
        return kept.result()

    def _forget(self, key: tuple[str, str], failed: Future[CompiledGrammar]) -> None:
        """What was not the grammar's fault is not held against it: the next that asks for it tries again."""
        with self._lock:
            if self._kept.get(key) is failed:
                del self._kept[key]

    def _make(self, response_format: ResponseFormat) -> CompiledGrammar:
        try:
            import llguidance
        except ImportError:
            raise ValueError("llguidance is not installed here: pip install 'millstream[worker]'") from None
        grammar = _translate(response_format, llguidance)
        try_to_compile(self._trial, grammar)
        vocabulary = self._vocabulary.loaded(llguidance)
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits(llguidance))
        started = time.thread_time()
        matcher.compute_bitmask()
        if problems := [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings():
            raise ValueError(problems[0])
        if time.thread_time() - started > _MASK_SECONDS:
            raise ValueError("too complex: a token would take longer to choose than to compute")
        return CompiledGrammar(matcher, self._vocabulary)


class CompiledGrammar:
    """A grammar ready for use; immutable, shared by all requests that ask for the same."""

    def __init__(self, matcher: Any, vocabulary: _Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def matcher(self) -> TokenMatcher:
        """A new matcher at the beginning."""
        return TokenMatcher(self._matcher.deep_copy(), self._vocabulary)


class TokenMatcher:
    """Where one choice stands. Used by one thread at a time."""

    __slots__ = ("_address", "_begun", "_matcher", "_vocabulary", "_words")

    def __init__(self, matcher: Any, vocabulary: _Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._words = vocabulary.empty_mask()
        self._address = self._words.ctypes.data
        self._begun = False

    def allowed(self, mask: npt.NDArray[np.int32]) -> None:
        """Write which ids may come next: bit `i % 32` of word `i // 32`, `[ceil(vocab_size / 32)]`, int32.

        Where the grammar is complete, all end-of-sequence ids are among them; where nothing else may follow, they
        are all there is.

        Raises:
            RequestError: the grammar leads nowhere from here, or is too complex to follow.
        """
        # 1 us into memory of ours; compute_bitmask, which makes bytes of it, takes 17.
        self._matcher.unsafe_compute_mask_ptr(self._address, self._words.nbytes)
        if not self._begun:
            self._words &= self._vocabulary.first
        self._vocabulary.fit(self._words, mask)
        if self._matcher.is_error():
            raise _error(f"the grammar cannot be followed here: {_reason(self._matcher.get_error())}")
        if not mask.any():
            raise _error(
                "the grammar leads nowhere: no token of the model may come next, and it is not complete"
            )

    def push(self, token_id: int) -> None:
        """Go on by a token; an end-of-sequence id changes nothing.

        Raises:
            RequestError: the grammar does not allow it here.
        """
        if token_id in self._vocabulary.eos_token_ids:
            return
        if not self._matcher.consume_token(token_id):
            reason = _reason(self._matcher.get_error())
            raise _error(f"the grammar does not allow token {token_id} here: {reason}")
        self._begun = True


class _Vocabulary:
    """The tokenizer as the library wants it, read when first needed (0.7 s for 49,152 tokens)."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._loaded: Any = None
        self.first: npt.NDArray[np.int32]
        """Mask of the ids that may be an output's first."""

    def loaded(self, llguidance: Any) -> Any:
        """
        Raises:
            ValueError: there is no tokenizer that the library can read, or no end-of-sequence id.
        """
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load(llguidance)
                self.first = self._first()
            return self._loaded

    def _load(self, llguidance: Any) -> Any:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        name = type(self._tokenizer).__name__
        if backend is None:
            raise ValueError(
                f"the model's tokenizer ({name}) is not a fast one, which structured output needs"
            )
        if not self.eos_token_ids:
            raise ValueError("the model has no end-of-sequence token, so nothing could end the output")
        written = {**json.loads(backend.to_str()), "padding": None, "truncation": None}
        size = max(backend.get_vocab_size(with_added_tokens=True), max(self.eos_token_ids) + 1)
        try:
            return llguidance.LLTokenizer(
                json.dumps(written), n_vocab=size, eos_token=sorted(self.eos_token_ids)
            )
        except ValueError as error:
            raise ValueError(f"llguidance cannot read the model's tokenizer ({name}): {error}") from None

    def empty_mask(self) -> npt.NDArray[np.int32]:
        """Room for a mask of the library: the tokenizer's width, not the logits'."""
        import numpy as np

        return np.zeros((self._loaded.vocab_size + 31) // 32, dtype=np.int32)

    def _first(self) -> npt.NDArray[np.int32]:
        """All ids, but none that begins with a space where the decoder drops an output's first one."""
        mask = ~self.empty_mask()
        named = self._tokenizer.get_vocab()
        spaced = [
            token_id for token, token_id in named.items() if token.startswith("\u2581") or token == "<0x20>"
        ]
        decode = self._tokenizer.backend_tokenizer.decode
        if spaced and not str(decode(spaced[:1])).startswith(" "):
            for token_id in spaced:
                mask[token_id // 32] &= ~(1 << token_id % 32)
        return mask

    def fit(self, words: npt.NDArray[np.int32], mask: npt.NDArray[np.int32]) -> None:
        """Copy a mask of the library to one of the logits' width."""
        shared = min(len(words), len(mask))
        mask[:shared] = words[:shared]
        mask[shared:] = 0
        if beyond := self._vocab_size % 32:
            mask[-1] &= (1 << beyond) - 1


def _source(response_format: ResponseFormat) -> str:
    """What makes a grammar the same as another of its type."""
    match response_format:
        case JsonSchemaFormat():
            return json.dumps(response_format.json_schema.schema_, ensure_ascii=False, allow_nan=False)
        case RegexFormat():
            return response_format.regex
        case ChoiceFormat():
            return json.dumps(response_format.choice, ensure_ascii=False)
        case GrammarFormat():
            return response_format.grammar
        case _:
            return ""


def _translate(response_format: ResponseFormat, llguidance: Any) -> str:
    """The grammar in the library's own notation."""
    matcher = llguidance.LLMatcher
    match response_format:
        case JsonObjectFormat():
            grammar = matcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON)
        case JsonSchemaFormat():
            schema = json_schema.prepare(response_format.json_schema.schema_)
            grammar = matcher.grammar_from_json_schema(schema, overrides=_JSON)
        case RegexFormat():
            grammar = matcher.grammar_from_regex(regex.common(response_format.regex))
        case ChoiceFormat():
            grammar = matcher.grammar_from_regex("|".join(map(regex.literal, response_format.choice)))
        case GrammarFormat():
            grammar = llguidance.grammar_from("grammar", response_format.grammar)
        case _:
            raise ValueError("no grammar can be made of this type")
    return str(grammar)


def _reason(message: str) -> str:
    """One line of what the library says, which may quote the whole grammar below it."""
    lines = message.strip().splitlines() or ["unknown error"]
    for line in lines:
        if line.startswith("error: "):
            lines = [line.removeprefix("error: ")]
    if lines[0] == "NoExtensionBias":
        return "nothing can be derived from it: it refers to itself without an end"
    return lines[0][:300]


def _error(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, f"response_format: {message}")
