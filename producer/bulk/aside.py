"""Work beside the caller's: what waits for a server while the caller goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def aside(do: Callable[[], T]) -> Future[T]:
    """Do something in a thread of its own.

    It keeps no program from ending, as the threads of a `ThreadPoolExecutor` would: whoever interrupts a run does not
    wait for a server that does not answer. (A thread takes 0.1 ms to start; a run needs two for some hundred rows.)
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(do())
        except BaseException as error:  # whatever it is, it is raised where the result is asked for
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done
