"""The choices that are not over.

add --> waits <--> runs --> its last token is drawn --> its end is told
        '- in the scheduler -'  `left`                  `gone`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.choice import Choice
from engine.sequence import Sequence


@dataclass(slots=True)
class Running:
    """A choice: what becomes of its tokens, and where it stands in the schedule."""

    choice: Choice
    sequence: Sequence
    row: int | None = None
    """Its row of what is drawn and not read."""
    left: bool = False
    """It holds no slot and no block any more, and is not in line: only its last token is still to be read."""
    gone: bool = False
    """Nothing is told of it any more: it has ended or failed, or has been aborted."""


class Roster:
    """All choices that are not over, by request. Falsy once there are none."""

    def __init__(self) -> None:
        self._requests: dict[str, dict[int, Running]] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Running]:
        """Every choice that is not over."""
        return (running for choices in self._requests.values() for running in choices.values())

    def add(self, request_id: str, choices: Iterable[Running]) -> None:
        """Enter the choices of a request, at least one."""
        self._requests[request_id] = {running.choice.index: running for running in choices}

    def of(self, sequence: Sequence) -> Running:
        """The choice of a sequence that is in the scheduler."""
        return self._requests[sequence.request.id][sequence.choice]

    def leave(self, running: Running) -> bool:
        """Strike off a choice that has ended; whether its request is over with it."""
        running.gone = True
        request_id = running.sequence.id
        choices = self._requests[request_id]
        del choices[running.choice.index]
        if choices:
            return False
        del self._requests[request_id]
        return True

    def drop(self, request_id: str) -> list[Running]:
        """Strike off a request; the choices it still had; empty if it is not here."""
        dropped = list(self._requests.pop(request_id, {}).values())
        for running in dropped:
            running.gone = True
        return dropped
