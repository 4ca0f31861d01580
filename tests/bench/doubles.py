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
    """Ours with KV in two dtypes, a peer, and one that is not there."""
    ours = {
        "gsm8k-32": task(32, 2.0, 200, kv_tokens_allocated=1000, kv_tokens_unused=25),
        "gsm8k-1": task(1, 4.0, 50, kv_tokens_allocated=100, kv_tokens_unused=10),
        "shared-prefix": task(10, 5.0, 80, cached_tokens=600),
    }
    in_16_bits = ours | {"gsm8k-32": task(32, 1.6, 200, kv_tokens_allocated=1000, kv_tokens_unused=20)}
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
            "millstream": engine_figures(ours, 3.0, "millstream 1", "", "float32"),
            "millstream-kv16": engine_figures(in_16_bits, 4.0, "millstream 1", "", "bfloat16"),
            "openvino": engine_figures(theirs, 5.0, "openvino 2", "16-bit", "8 bits"),
            "vllm": {"why": "not installed: no module vllm"},
        },
        "fewest": {"gsm8k-32": 900, "gsm8k-1": 1000, "shared-prefix": 250},
        "limits": {
            name: {
                "gsm8k-32": {"same_steps": 1.5 if name == "millstream" else 1.2, "perfect": 1.0},
                "gsm8k-1": {"same_steps": 3.0, "perfect": 2.0},
            }
            for name in ("millstream", "millstream-kv16")
        },
    }


def engine_figures(
    tasks: dict[str, Any], load_seconds: float, versions: str, note: str, kv_dtype: str
) -> dict[str, Any]:
    """An engine's figures."""
    about = {"versions": versions, "note": note, "kv_dtype": kv_dtype}
    return {"tasks": tasks, "load_seconds": load_seconds, **about}
