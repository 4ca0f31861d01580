"""Stand-ins for what benchmarks read: a tokenizer without a model, and figures without a measurement."""

from __future__ import annotations

from typing import Any


class Words:
    """A tokenizer with a token a word, and a chat template that writes role and content."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [self._ids.setdefault(word, len(self._ids)) for word in text.split()]

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert add_generation_prompt
        assert not tokenize
        return " ".join(f"<{one['role']}> {one['content']}" for one in messages) + " <assistant>"


def task(at_once: int, seconds: float, output_tokens: int, **more: Any) -> dict[str, Any]:
    """A task's figures."""
    return {
        "rows": max(at_once, 8),
        "at_once": at_once,
        "seconds": seconds,
        "prompt_tokens": 1000,
        "output_tokens": output_tokens,
        "cached_tokens": None,
        "steps": [],
        "kv_tokens_allocated": 0,
        "kv_tokens_unused": 0,
    } | more


def offline_figures() -> dict[str, Any]:
    """Two engines that answered, and one that is not there."""
    ours = {
        "gsm8k-32": task(32, 2.0, 200, kv_tokens_allocated=1000, kv_tokens_unused=25),
        "gsm8k-1": task(1, 4.0, 50, kv_tokens_allocated=100, kv_tokens_unused=10),
        "shared-prefix": task(10, 5.0, 80, cached_tokens=600),
    }
    theirs = {
        "gsm8k-32": task(32, 4.0, 200),
        "gsm8k-1": task(1, 2.0, 50),
        "shared-prefix": task(10, 8.0, 80),
    }
    return {
        "machine": "2 CPUs, a processor",
        "model": "a-model",
        "dtype": "float32",
        "engines": {
            "millstream": {"tasks": ours, "load_seconds": 3.0, "versions": "millstream 1", "note": ""},
            "openvino": {"tasks": theirs, "load_seconds": 5.0, "versions": "openvino 2", "note": "16-bit"},
            "vllm": {"why": "not installed: no module vllm"},
        },
        "fewest": {"gsm8k-32": 900, "gsm8k-1": 1000, "shared-prefix": 250},
        "limits": {
            "gsm8k-32": {"same_steps": 1.5, "perfect": 1.0},
            "gsm8k-1": {"same_steps": 3.0, "perfect": 2.0},
        },
    }
