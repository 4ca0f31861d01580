"""The program `millstream`: the one place where a fault becomes a line on stderr and an exit code.

Nothing slow is imported before `main` hears interrupts: one that fell among the imports would show where.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_WORKER_MODULES = {"accelerate", "gguf", "numba", "numpy", "safetensors", "torch", "transformers"}
_INTERRUPTED = 128 + signal.SIGINT

CLOSING_S = 1.0
"""What an interrupted program may take to close, before it is interrupted again."""


def main() -> None:
    """Run the command line and end the process with its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # answers hold what no terminal's code page has
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as behind nohup
        signal.signal(signal.SIGINT, _interrupt)
    code = _run()
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.exit(code if _flush() else 1)


def _run() -> int:
    """Run it; its exit code."""
    try:
        from millstream.verbs import build

        build()(prog_name="millstream")
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except Exception as error:
        if signal.getsignal(signal.SIGALRM) is _interrupt:  # what it fell into made another error of it
            return _INTERRUPTED
        line, code = _explain(error)
        print(f"millstream: {line}", file=sys.stderr)
        return code
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt, once a second until the program ends.

    One that falls between taking and holding a lock leaves it taken, and what is closed on the way out may wait for
    it: `watch`, interrupted just as it had subscribed, hung about once in sixty times until it was interrupted again.
    One that falls into a `__del__` or a callback of the collector is lost there.
    """
    sys.unraisablehook = _keep_silent
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, CLOSING_S)
    raise KeyboardInterrupt


def _keep_silent(lost: sys.UnraisableHookArgs) -> None:
    """Say nothing of an interrupt that was lost: there will be another one."""
    if lost.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(lost)


def _explain(error: Exception) -> tuple[str, int]:
    """A fault in a line, and its exit code; what is no user's mistake is raised again, with its traceback."""
    from producer.cli import exits
    from producer.refusal import Refused
    from protocol import MillstreamError, OptionRefused, RequestError

    if isinstance(error, OptionRefused):
        return error.as_flags(), exits.REFUSED
    if isinstance(error, MillstreamError):
        return str(error), exits.REFUSED if isinstance(error, Refused | RequestError) else exits.FAILED
    if isinstance(error, ModuleNotFoundError) and error.name in _WORKER_MODULES:
        return f"{error.name} is missing: pip install 'millstream[worker]'", exits.REFUSED
    if isinstance(error, OSError):  # a full disk behind stdout, a file that went away
        return ": ".join(
            str(part) for part in (error.strerror or error, error.filename) if part
        ), exits.FAILED
    raise error


def _flush() -> bool:
    """Write out stdout. False: its reader has gone (as in `| head`) or its disk is full; nothing more is written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


if __name__ == "__main__":
    main()
