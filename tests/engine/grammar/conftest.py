"""A tokenizer of bytes, and grammars over it."""

from __future__ import annotations

from typing import Any

import pytest

from bench.grammar import Walker
from engine.grammar import Grammars
from tests.engine.grammar.asking import (
    EOS,
    VOCAB_SIZE,
)
from tests.models import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(VOCAB_SIZE)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, VOCAB_SIZE, {EOS})


@pytest.fixture(scope="module")
def walker(tokenizer: Any) -> Walker:
    return Walker(tokenizer, EOS, VOCAB_SIZE)
