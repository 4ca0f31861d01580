"""Grammars are compiled in a process of their own first: one that blows up takes nothing else with it.

    Trial.check(grammar) --stdin, a line of JSON-->  this file as a script: compiles, with a vocabulary of bytes
                         <-stdout, a line of JSON--  "", or what is wrong with it

What a few hundred bytes can do to the library: an `allOf` of 20 patterns compiles for 16 s, 3,000 definitions that
refer to each other overflow the stack and end the process, nested counted repetitions fill the memory. Its own
limits catch most of that (see `limits`), and this catches the rest: a deadline, a bound on memory, a small stack.
A check costs 0.2 ms beside the compilation; the process starts with the first one, in 0.1 s.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
import weakref
from typing import Any

SECONDS = 5.0
_MEMORY_BYTES = 2 << 30
_STACK_BYTES = 4 << 20
"""Half of what a thread has by default, so what passes here passes there."""


class Trial:
    """The process, started when first needed and again after it died. Safe on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: str) -> None:
        """Compile it there.

        Raises:
            ValueError: it does not compile, or took too long, or too much memory.
        """
        with self._lock:
            process = self._running()
            answer = _ask(process, grammar)
            if answer is None:
                process.kill()
                process.wait()
                self._process = None
        if answer is None:
            raise ValueError(
                f"too complex: it took more than {SECONDS:.0f} s or {_MEMORY_BYTES >> 30} GiB to compile"
            )
        if answer:
            raise ValueError(answer)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            # -P: the folder of this file is not where modules are looked for.
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            weakref.finalize(self, _end, self._process)
        return self._process


def _ask(process: subprocess.Popen[bytes], grammar: str) -> str | None:
    """What is wrong with it, "" for nothing; None without an answer in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(grammar).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    ready, _, _ = select.select([process.stdout], [], [], SECONDS)
    line = process.stdout.readline() if ready else b""
    return str(json.loads(line)) if line else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


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


def _serve() -> None:
    import llguidance

    vocabulary = _vocabulary(llguidance)
    for line in sys.stdin:
        matcher = llguidance.LLMatcher(vocabulary, json.loads(line), log_level=0, limits=limits(llguidance))
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps(matcher.get_error()), flush=True)


def _main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    _main()
