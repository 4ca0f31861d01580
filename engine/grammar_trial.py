"""Grammars are compiled in a process of their own first.

What a few hundred bytes can do to the library: an `allOf` of 20 patterns compiles for 16 s, 3,000 definitions that
refer to each other overflow the stack and end the process, nested counted repetitions fill the memory. Its own
limits catch most of that (see `limits`), and this catches the rest.
"""

from __future__ import annotations

from typing import Any

from engine.trial import MEMORY_BYTES, Trial, serve

SECONDS = 5.0
"""Of processor time."""


def try_to_compile(trial: Trial, grammar: str) -> None:
    """Compile it, with a vocabulary of bytes.

    Args:
        trial: of this module.

    Raises:
        ValueError: it does not compile, or took too long, or too much memory.
        TrialFailed: it could not be tried.
    """
    fault = trial.ask(grammar, SECONDS)
    if fault is None:
        raise ValueError(
            f"too complex: it took more than {SECONDS:g} s or {MEMORY_BYTES >> 30} GiB to compile"
        )
    if fault:
        raise ValueError(fault)


def limits(llguidance: Any) -> Any:
    """What a grammar may cost: in symbols (2,000 optional properties take 1 s, 8,000 would take 59), and a mask in
    items of the parser (20,000 are about 0.1 s)."""
    return llguidance.LLParserLimits(max_grammar_size=50_000, step_max_items=20_000, verbose_errors=False)


def _vocabulary(llguidance: Any) -> Any:
    class Bytes:
        eos_token_id = 256
        bos_token_id = None
        tokens = (*(bytes([byte]) for byte in range(256)), b"</s>")
        special_token_ids = (256,)

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def _main() -> None:
    import llguidance

    vocabulary = _vocabulary(llguidance)

    def fault_of(grammar: Any) -> str:
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits(llguidance))
        if not matcher.is_error():
            matcher.compute_bitmask()
        fault: str = matcher.get_error()
        return fault

    serve(fault_of)


if __name__ == "__main__":
    _main()
