"""Dead letters for a producer: looking at them, and giving their jobs another life."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pydantic import ValidationError

from broker import dead_letters
from broker.dead_letters import DeadLetter, Requeued
from broker.keys import Keys
from broker.script import Call
from producer.printing import printable
from producer.request import check_id
from protocol import (
    Job,
    JobNotFound,
    MillstreamError,
    QueueFull,
    RequestError,
    WrongState,
    describe_validation,
)

if TYPE_CHECKING:
    from producer.async_client import AsyncClient
    from producer.client import Client

AT_ONCE = 100
_LETTER = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")
_END = 1 << 64
"""An id of a stream's entry is two numbers of 64 bits."""


class DeadLetters:
    """A queue's dead letters. A letter goes by its own id, or by its job's."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._keys = client.queue.keys

    def list(self, count: int = AT_ONCE, after: str = "") -> list[DeadLetter]:
        """Up to `count` letters behind `after` (a letter's id), the oldest first; without what they hold.

        Raises:
            RequestError: no letter can have that id.
        """
        check_after(after)
        found: list[DeadLetter] = []
        while len(found) < count:
            asked = min(count - len(found), AT_ONCE)
            letters = self._client.run(dead_letters.dead_list(self._keys, asked, after))
            if not letters:
                break
            found += letters
            after = letters[-1].letter
        return found

    def show(self, name: str) -> DeadLetter:
        """One letter, whole.

        Raises:
            JobNotFound: there is none.
            RequestError: nothing can have that id.
        """
        return known(name, self._client.run(dead_letters.dead_show(self._keys, check_id(name))))

    def requeue(self, name: str) -> str:
        """Give its job another life: from its prompt, without what it had written; its id.

        Raises:
            JobNotFound: there is no such letter.
            WrongState: its job has another life already, or it never was a job.
            QueueFull: the queue is full.
        """
        letter = self.show(name)
        call, job_id = requeue_call(self._keys, letter)
        check_requeued(self._keys.queue, letter, self._client.run(call))
        return job_id

    def purge(self, *names: str) -> int:
        """Delete letters for good; how many there were. Raises RequestError for what no id can be."""
        return self._client.run(dead_letters.dead_purge(self._keys, [*map(check_id, names)]))

    def purge_all(self) -> int:
        """Delete all of them; how many there were."""
        return self._client.run(dead_letters.dead_purge(self._keys, None))


class AsyncDeadLetters:
    """`DeadLetters`, for asyncio."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._keys = client.queue.keys

    async def list(self, count: int = AT_ONCE, after: str = "") -> list[DeadLetter]:
        """Up to `count` letters behind `after`, the oldest first."""
        check_after(after)
        found: list[DeadLetter] = []
        while len(found) < count:
            asked = min(count - len(found), AT_ONCE)
            letters = await self._client.run(dead_letters.dead_list(self._keys, asked, after))
            if not letters:
                break
            found += letters
            after = letters[-1].letter
        return found

    async def show(self, name: str) -> DeadLetter:
        """One letter, whole."""
        return known(name, await self._client.run(dead_letters.dead_show(self._keys, check_id(name))))

    async def requeue(self, name: str) -> str:
        """Give its job another life; its id."""
        letter = await self.show(name)
        call, job_id = requeue_call(self._keys, letter)
        check_requeued(self._keys.queue, letter, await self._client.run(call))
        return job_id

    async def purge(self, *names: str) -> int:
        """Delete letters for good; how many there were."""
        return await self._client.run(dead_letters.dead_purge(self._keys, [*map(check_id, names)]))

    async def purge_all(self) -> int:
        """Delete all of them; how many there were."""
        return await self._client.run(dead_letters.dead_purge(self._keys, None))


def check_after(letter: str) -> None:
    """Nothing, for the id of a letter, or '' before the first.

    Raises:
        RequestError: it is something else, such as a job's id.
    """
    if letter and not (_LETTER.fullmatch(letter) and all(int(part) < _END for part in letter.split("-"))):
        raise RequestError.invalid(
            f"after {letter!r}: give the id of a dead letter as the list shows it, such as 1735689600000-0"
        )


def known(name: str, letter: DeadLetter | None) -> DeadLetter:
    """The letter.

    Raises:
        JobNotFound: there is none.
    """
    if letter is None:
        raise JobNotFound(
            f"no dead letter {name}: no job of that id is dead, or the letter was requeued or purged"
        )
    return letter


def requeue_call(keys: Keys, letter: DeadLetter) -> tuple[Call[Requeued], str]:
    """What gives a letter's job another life, and the job's id.

    Raises:
        WrongState: it never was a job, or its payload is lost.
    """
    if letter.reason == "not_a_job":
        raise WrongState(
            f"dead letter {letter.letter} is not a job (not_a_job): it can only be shown and purged"
        )
    if letter.reason == "lost_payload":
        raise WrongState(
            f"dead letter {letter.letter}: the payload of job {printable(letter.job_id)} is lost; submit the job "
            "again"
        )
    if not letter.raw:
        raise WrongState(f"dead letter {letter.letter}: it holds no job; it can only be shown and purged")
    try:
        job = Job.decode(letter.raw)
    except ValidationError as error:
        raise WrongState(
            f"dead letter {letter.letter}: this version cannot read its job: {describe_validation(error)}"
        ) from None
    return dead_letters.dead_requeue(keys, letter.letter, job), job.id


def check_requeued(queue: str, letter: DeadLetter, answer: Requeued) -> None:
    """Nothing, where the job is queued.

    Raises:
        MillstreamError: it is not, and why.
    """
    error: MillstreamError | None = None
    if answer.outcome == "unknown":
        known(letter.letter, None)
    elif answer.outcome == "alive":
        error = WrongState(
            f"job {printable(letter.job_id)} is {answer.state}: only a dead job can be requeued, and this id has "
            "another life"
        )
    elif answer.outcome == "full":
        error = QueueFull(f"queue {queue} is full; try again later")
    if error is not None:
        raise error
