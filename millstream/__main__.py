"""The program `millstream`: the one place where a fault becomes a line on stderr and an exit code.

Nothing slow is imported before `main` hears interrupts: one that fell among the imports would show where.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn, TextIO

_WORKER_MODULES = {"accelerate", "gguf", "numba", "numpy", "safetensors", "torch", "transformers"}
_INTERRUPTED = 128 + signal.SIGINT

CLOSING_S = 1.0
"""What an interrupted program may take to close, before it is interrupted again."""


def main() -> None:
    """Run the command line and end the process with its exit code."""
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # answers hold what no terminal's code page has
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as behind nohup
        signal.signal(signal.SIGINT, _interrupt)
    code = _run()
    signal.setitimer(signal.ITIMER_REAL, 0)
    code = code if _flush() else 1
    try:
        sys.stderr.flush()
    except OSError:  # what is left of it would make Python's end a failure of its own
        _give_up(sys.stderr)
    sys.exit(code)


def _open_streams() -> None:
    """Put /dev/null where the caller closed stdin, stdout or stderr (`>&-`), before anything else gets its number.

    Python has None for such a stream: `print` to a stderr that is None writes to stdout, and who flushes one fails.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)  # what we start has three streams too
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            stream = open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


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
        if isinstance(error, OSError) and error.filename is None and not _flush():
            return 1  # it was stdout's, and that is said
        from producer.printing import printable_lines

        line, code = _explain(error)
        _say(printable_lines(line))
        return code
    return 0


def _say(line: str) -> None:
    with suppress(OSError):  # stderr's disk may be full as well: the exit code says it
        print(f"millstream: {line}", file=sys.stderr, flush=True)


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
    from protocol import BadUrl, MillstreamError, OptionRefused, RequestError

    if isinstance(error, OptionRefused):
        return error.as_flags(), exits.REFUSED
    if isinstance(error, MillstreamError):
        return str(error), exits.REFUSED if isinstance(
            error, Refused | RequestError | BadUrl
        ) else exits.FAILED
    if isinstance(error, ModuleNotFoundError) and error.name in _WORKER_MODULES:
        return f"{error.name} is missing: pip install 'millstream[worker]'", exits.REFUSED
    if isinstance(error, OSError):  # a full disk behind stdout, a file that went away
        return ": ".join(
            str(part) for part in (error.strerror or error, error.filename) if part
        ), exits.FAILED
    raise error


def _flush() -> bool:
    """Write out stdout. False: its reader has gone (as in `| head`) or, which is said, its disk is full; nothing more
    is written.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            _say(f"stdout could not be written: {error.strerror}")
        _give_up(sys.stdout)
        return False
    return True


def _give_up(stream: TextIO) -> None:
    """Write nothing more of what is, and will be, in a stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
