"""A program for `engine.trial.Trial` that does what its questions say: good ones and bad ones.

TRIAL_NEVER_READY in its environment spoils its start. TRIAL_RESERVED is how many bytes of address space it takes
first, as a library with many threads does.
"""

from __future__ import annotations

import mmap
import os
import signal
from typing import Any

from engine.trial import serve


def answer(question: Any) -> Any:
    match question:
        case {"say": text}:
            return text
        case {"variable": name}:
            return os.environ.get(name, "")
        case {"take": size}:
            try:
                mmap.mmap(-1, size).close()
            except OSError:
                return "no memory"
            return "taken"
        case {"signal": number}:
            os.kill(os.getpid(), number)
        case {"exit": code}:
            os._exit(code)
    while True:
        pass


def main() -> None:
    reserved = None
    if size := int(os.environ.get("TRIAL_RESERVED", "0")):
        reserved = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    if "TRIAL_NEVER_READY" in os.environ:
        signal.pause()
    serve(answer)
    del reserved


if __name__ == "__main__":
    main()
