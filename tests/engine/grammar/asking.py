"""Asking for a response format, and what its grammar lets through."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pydantic import TypeAdapter

from bench.grammar import Walker, accepts
from engine.grammar import CompiledGrammar, Grammars
from engine.interface import Matcher
from protocol import ErrorCode, RequestError, ResponseFormat

EOS = 2
VOCAB_SIZE = 259
FORMATS: TypeAdapter[Any] = TypeAdapter(ResponseFormat)


def asked(kind: str, **fields: Any) -> Any:
    return FORMATS.validate_python({"type": kind, **fields})


def schema_asked(schema: Any) -> Any:
    return asked("json_schema", json_schema={"schema": schema})


def compiled(grammars: Grammars, response_format: Any) -> CompiledGrammar:
    grammar = grammars.compile(response_format)
    assert grammar is not None
    return grammar


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    mask: npt.NDArray[np.int32] = np.full((vocab_size + 31) // 32, -1, dtype=np.int32)
    matcher.allowed(mask)
    return set(np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0].tolist())


def takes(grammars: Grammars, response_format: Any, text: str, walker: Walker) -> bool:
    """Whether the text is a whole output."""
    matcher = compiled(grammars, response_format).matcher()
    return accepts(matcher, walker.tokenizer.encode(text, add_special_tokens=False), walker)


def problem(grammars: Grammars, response_format: Any) -> str | None:
    """Why it is refused, on one line; None where it compiles."""
    try:
        grammars.compile(response_format)
    except RequestError as error:
        return error.message
    return None


def refusal(grammars: Grammars, response_format: Any) -> str:
    with pytest.raises(RequestError) as raised:
        grammars.compile(response_format)
    assert raised.value.code is ErrorCode.INVALID_REQUEST
    assert "\n" not in raised.value.message
    return raised.value.message
