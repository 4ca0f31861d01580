"""Ctrl-C and SIGTERM, heard between two steps.

An exception out of a signal handler surfaces wherever the program happens to be. Inside pydantic it was taken for a
serialization error: the interrupt was lost, and an innocent row got an error (within twenty of fifty interrupts).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupt:
    """Remembers that the run was told to stop."""

    def __init__(self) -> None:
        self._asked = False
        self._at_once = False

    def listen(self) -> None:
        """From now on the process's signals are heard here. A second one does not wait for the step's end."""
        signal.signal(signal.SIGINT, self._hear)
        signal.signal(signal.SIGTERM, self._hear)

    def check(self) -> None:
        """Stop here if told to.

        Raises:
            KeyboardInterrupt: the run was told to stop.
        """
        if self._asked:
            raise KeyboardInterrupt

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """For waits and reads that may take long, and that an exception cannot harm."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def _hear(self, *_: object) -> None:
        again, self._asked = self._asked, True
        if again or self._at_once:
            raise KeyboardInterrupt
