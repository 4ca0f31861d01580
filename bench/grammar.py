"""Libraries for structured output side by side: which schemas they take, whether they keep them, and what it costs.

    python -m bench.grammar                 whichever of llguidance and xgrammar is installed, and ours
    python -m bench.grammar --walks 20      more random outputs a schema

For each schema of `data/schemas.jsonl`: is it taken? Then outputs of random allowed tokens of SmolLM2 are validated
with jsonschema (formats too), and instances that are known to be wrong are offered. Either way, an output that does
not validate makes the schema a broken one. Masks are timed along the right instances.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from jsonschema import Draft202012Validator, FormatChecker
from referencing import Registry
from referencing.exceptions import Unresolvable

from engine.interface import Matcher

SCHEMAS = Path(__file__).parent / "data" / "schemas.jsonl"
ROWS = 64


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, with some of what it allows and of what it forbids."""

    name: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]


class Library(Protocol):
    """`compile` raises what it likes for a schema that it refuses, and returns what makes matchers."""

    name: str

    def compile(self, schema: Any) -> Callable[[], Matcher]: ...


def cases() -> list[Case]:
    return [Case(**json.loads(line)) for line in SCHEMAS.read_text().splitlines()]


# Outputs


def validator(schema: Any) -> Draft202012Validator:
    """jsonschema's, with a check of times, for which it wants packages of its own."""
    formats = FormatChecker()
    for name, prefix in (("date-time", ""), ("time", "2000-01-01T")):
        formats.checks(name, ValueError)(lambda text, prefix=prefix: _is_time(prefix + text))
    return Draft202012Validator(schema, registry=Registry(), format_checker=formats)


def _is_time(text: Any) -> bool:
    return text[10] == "T" and datetime.fromisoformat(text).utcoffset() is not None


class Walker:
    """Draws random allowed tokens, and after a while those that close something, until the output ends."""

    def __init__(self, tokenizer: Any, eos_token_id: int, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.vocab_size = vocab_size
        texts = tokenizer.batch_decode([[token_id] for token_id in range(len(tokenizer))])
        closing = {'"', "}", "]", "null", "n", "u", "l", ",", ":", "0", "1", '"}', "}}", "Z", "@", "."}
        self._closing = np.array([text in closing for text in texts] + [False] * (vocab_size - len(texts)))

    def walk(self, matcher: Matcher, seed: int, most: int = 400) -> str | None:
        """The text of a finished output; None if it had not ended after `most` tokens."""
        rng = random.Random(seed)
        token_ids: list[int] = []
        mask = np.zeros((self.vocab_size + 31) // 32, dtype=np.int32)
        while len(token_ids) < most:
            matcher.allowed(mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size].astype(bool)
            late = len(token_ids) > rng.randrange(40)
            if allowed[self.eos_token_id] and (late or allowed.sum() == 1 or rng.random() < 0.2):
                return str(self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
            allowed[self.eos_token_id] = False
            closing = allowed & self._closing
            (choices,) = np.nonzero(closing if late and closing.any() else allowed)
            token_ids.append(int(rng.choice(choices)))
            matcher.push(token_ids[-1])
        return None


def accepts(matcher: Matcher, token_ids: list[int], walker: Walker) -> bool:
    """Whether these tokens are a whole output."""
    mask = np.zeros((walker.vocab_size + 31) // 32, dtype=np.int32)
    for token_id in [*token_ids, walker.eos_token_id]:
        matcher.allowed(mask)
        if not mask[token_id // 32] >> token_id % 32 & 1:
            return False
        if token_id != walker.eos_token_id:
            matcher.push(token_id)
    return True


# Libraries


class Ours:
    name = "engine.grammar"

    def __init__(self, walker: Walker) -> None:
        from engine.grammar import Grammars

        self._grammars = Grammars(walker.tokenizer, walker.vocab_size, {walker.eos_token_id})

    def compile(self, schema: Any) -> Callable[[], Matcher]:
        from protocol.response_format import JsonSchema, JsonSchemaFormat

        asked = JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(schema_=schema))
        grammar = self._grammars.compile(asked)
        assert grammar is not None
        return grammar.matcher


class LLGuidance:
    name = "llguidance"

    def __init__(self, walker: Walker) -> None:
        import llguidance.hf

        self._library = llguidance
        self._vocabulary = llguidance.hf.from_tokenizer(walker.tokenizer, n_vocab=walker.vocab_size)

    def compile(self, schema: Any) -> Callable[[], Matcher]:
        matcher = self._library.LLMatcher
        grammar = matcher.grammar_from_json_schema(schema)
        compiled = matcher(self._vocabulary, grammar, log_level=0)
        if compiled.is_error():
            raise ValueError(compiled.get_error())
        return lambda: _LLGuidanceMatcher(compiled.deep_copy())


class _LLGuidanceMatcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, mask: npt.NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def push(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class XGrammar:
    name = "xgrammar"

    def __init__(self, walker: Walker) -> None:
        import xgrammar

        self._library = xgrammar
        vocabulary = xgrammar.TokenizerInfo.from_huggingface(walker.tokenizer, vocab_size=walker.vocab_size)
        self._compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)

    def compile(self, schema: Any) -> Callable[[], Matcher]:
        compiled = self._compiler.compile_json_schema(
            json.dumps(schema), strict_mode=False, max_whitespace_cnt=20
        )
        return lambda: _XGrammarMatcher(self._library.GrammarMatcher(compiled))


class _XGrammarMatcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, mask: npt.NDArray[np.int32]) -> None:
        self._matcher.fill_next_token_bitmask(mask.reshape(1, -1))

    def push(self, token_id: int) -> None:
        self._matcher.accept_token(token_id)


# Measures


@dataclass(slots=True)
class Measured:
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    batch_ms: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)


def measure(library: Library, walker: Walker, walks: int) -> Measured:
    measured = Measured()
    corpus = cases()
    library.compile(corpus[0].schema)  # the vocabulary is read with the first one
    for case in corpus:
        started = time.perf_counter()
        try:
            matcher = library.compile(case.schema)
        except Exception as error:  # each library has its own
            measured.refused.append(f"{case.name}: {str(error).splitlines()[0]}")
            continue
        measured.compile_ms.append((time.perf_counter() - started) * 1e3)
        if wrong := next(_wrong_outputs(case, matcher, walker, walks), None):
            measured.broken.append(f"{case.name}: {wrong}")
        _time_masks(case, matcher, walker, measured)
        if not all(accepts(matcher(), ids, walker) for ids in _tokens(case.valid, walker)):
            measured.incomplete.append(case.name)
    return measured


def _wrong_outputs(case: Case, matcher: Callable[[], Matcher], walker: Walker, walks: int) -> Iterator[str]:
    valid = validator(case.schema)
    for instance, token_ids in zip(case.invalid, _tokens(case.invalid, walker), strict=True):
        if accepts(matcher(), token_ids, walker):
            yield f"allows {json.dumps(instance)}"
    for seed in range(walks):
        text = walker.walk(matcher(), seed)
        try:
            if text is not None and not valid.is_valid(json.loads(text)):
                yield f"made {text!r}"
        except (json.JSONDecodeError, Unresolvable) as error:
            yield f"made {text!r}: {error}"


def _tokens(instances: list[Any], walker: Walker) -> list[list[int]]:
    texts = [json.dumps(each, ensure_ascii=False, separators=(",", ":")) for each in instances]
    return [walker.tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _time_masks(case: Case, matcher: Callable[[], Matcher], walker: Walker, measured: Measured) -> None:
    masks = np.zeros((ROWS, (walker.vocab_size + 31) // 32), dtype=np.int32)
    for token_ids in _tokens(case.valid[:1], walker):
        rows = [matcher() for _ in range(ROWS)]
        for token_id in token_ids:
            started = time.perf_counter()
            rows[0].allowed(masks[0])
            first = time.perf_counter()
            for row, mask in zip(rows, masks, strict=True):
                row.allowed(mask)
            measured.mask_us.append((first - started) * 1e6)
            measured.batch_ms.append((time.perf_counter() - first) * 1e3)
            for row in rows:
                row.push(token_id)


def _main() -> None:
    from transformers import AutoTokenizer

    from engine.gguf_cache import converted
    from tests.models import smollm2_gguf

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--walks", type=int, default=5, help="random outputs a schema (5)")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(converted(smollm2_gguf())[0])
    walker = Walker(tokenizer, tokenizer.eos_token_id, len(tokenizer))
    kinds: list[type[LLGuidance] | type[XGrammar]] = [LLGuidance, XGrammar]
    libraries: list[Library] = [Ours(walker), *(kind(walker) for kind in kinds if find_spec(kind.name))]
    results = {library.name: measure(library, walker, arguments.walks) for library in libraries}
    print(f"{len(cases())} schemas, {len(tokenizer):,} tokens, {arguments.walks} random outputs each\n")
    print("| | refused | broken | compile ms, median, worst | mask us, median, p99 | 64 masks ms, median |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, got in results.items():
        print(
            f"| {name} | {len(got.refused)} | {len(got.broken)} "
            f"| {statistics.median(got.compile_ms):.1f}, {max(got.compile_ms):.0f} "
            f"| {statistics.median(got.mask_us):.0f}, {np.percentile(got.mask_us, 99):.0f} "
            f"| {statistics.median(got.batch_ms):.2f} |"
        )
    for name, got in results.items():
        for what in ("refused", "broken", "incomplete"):
            print(f"\n{name}, {what}:", *getattr(got, what), sep="\n    ")


if __name__ == "__main__":
    _main()
