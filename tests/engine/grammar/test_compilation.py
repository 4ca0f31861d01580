"""Grammars are compiled once, in any thread, and only once one is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.grammar import Walker
from engine import grammar as grammar_module
from engine import trial as trial_module
from engine.grammar import Grammars
from engine.trial import TrialFailed
from protocol import ErrorCode, RequestError
from tests.engine.grammar.asking import (
    EOS,
    VOCAB_SIZE,
    asked,
    compiled,
    refusal,
    schema_asked,
)


def test_what_was_compiled_is_kept_and_the_oldest_goes(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "MAX_KEPT", 2)
    own = Grammars(tokenizer, VOCAB_SIZE, {EOS})
    a, b, c = (asked("choice", choice=[letter]) for letter in "abc")
    first, second = own.compile(a), own.compile(b)
    assert own.compile(asked("choice", choice=["a"])) is first
    own.compile(c)
    assert own.compile(a) is first
    assert own.compile(b) is not second


def test_a_schema_is_kept_by_what_it_says_in_order(grammars: Grammars) -> None:
    a, b = {"type": "integer"}, {"type": "string"}
    first = grammars.compile(schema_asked({"type": "object", "properties": {"a": a, "b": b}}))
    assert grammars.compile(schema_asked({"type": "object", "properties": {"b": b, "a": a}})) is not first
    named = asked(
        "json_schema", json_schema={"name": "x", "schema": {"type": "object", "properties": {"a": a, "b": b}}}
    )
    assert grammars.compile(named) is first


def test_threads_share_one_compilation(tokenizer: Any, walker: Walker) -> None:
    own = Grammars(tokenizer, VOCAB_SIZE, {EOS})
    start = threading.Barrier(8)

    def ask(number: int) -> tuple[Any, str | None]:
        start.wait()
        shared = compiled(own, schema_asked({"type": "array", "items": {"type": "integer"}, "maxItems": 3}))
        compiled(own, asked("choice", choice=[f"choice {number}"]))
        with pytest.raises(RequestError):
            own.compile(asked("regex", regex="("))
        return shared, walker.walk(shared.matcher(), number)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(ask, range(8)))
    assert len({id(grammar) for grammar, _ in results}) == 1
    alone = [walker.walk(results[0][0].matcher(), number) for number in range(8)]
    assert [text for _, text in results] == alone


def test_nothing_is_imported_or_started_before_it_is_needed() -> None:
    code = (
        "import sys, engine.grammar as g; g.Grammars(object(), 8, {2});"
        "assert not {'llguidance', 'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_library_the_row_says_what_to_install(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    message = refusal(Grammars(tokenizer, VOCAB_SIZE, {EOS}), asked("json_object"))
    assert "pip install 'millstream[worker]'" in message


class SlowTokenizer:
    """No fast backend."""


def test_a_tokenizer_that_cannot_be_read_is_named(tokenizer: Any) -> None:
    assert "SlowTokenizer" in refusal(Grammars(SlowTokenizer(), VOCAB_SIZE, {EOS}), asked("json_object"))
    assert "no end-of-sequence" in refusal(Grammars(tokenizer, VOCAB_SIZE, ()), asked("json_object"))


def test_a_process_that_stands_still_is_not_held_against_a_grammar(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Grammars(tokenizer, VOCAB_SIZE, {EOS})
    compiled(own, asked("choice", choice=["first"]))
    assert own._trial._process is not None
    os.kill(own._trial._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(trial_module, "SILENT_SECONDS", 0.1)
        with pytest.raises(RequestError, match=r"response_format\.choice: .* no answer") as raised:
            own.compile(asked("choice", choice=["a", "b"]))
    assert raised.value.code is ErrorCode.DEVICE_ERROR
    compiled(own, asked("choice", choice=["a", "b"]))


@pytest.mark.parametrize(
    ("failure", "code", "tries"),
    [
        (ValueError("too complex"), ErrorCode.INVALID_REQUEST, 1),
        (RecursionError("too deep"), ErrorCode.INVALID_REQUEST, 1),
        (TrialFailed("no process"), ErrorCode.DEVICE_ERROR, 2),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else None,
)
def test_only_a_grammars_own_fault_is_kept(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, failure: Exception, code: ErrorCode, tries: int
) -> None:
    tried: list[str] = []

    def fail(_trial: Any, grammar: str) -> None:
        tried.append(grammar)
        raise failure

    monkeypatch.setattr(grammar_module, "try_to_compile", fail)
    own = Grammars(tokenizer, VOCAB_SIZE, {EOS})
    for _ in range(2):
        with pytest.raises(RequestError, match=str(failure)) as raised:
            own.compile(asked("choice", choice=["a"]))
        assert raised.value.code is code
    assert len(tried) == tries
