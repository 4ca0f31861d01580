"""A job on the screen: text or JSON on stdout, everything about it on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from producer.cli import exits
from producer.printing import printable, printable_lines

if TYPE_CHECKING:
    from producer.client import Client, JobHandle
    from protocol import Choice, JobError, TokenEvent


def note(text: str) -> None:
    """One line on stderr."""
    print(f"millstream: {printable_lines(text)}", file=sys.stderr, flush=True)


def note_torn(torn: Sequence[str]) -> None:
    """Say what of the inputs was missing."""
    for fault in torn:
        note(f"the input is incomplete: {fault}")


def note_missing_worker(client: Client) -> None:
    """Say so if nobody would run the job."""
    status = client.status()
    name = client.queue.keys.queue
    if any(beat.alive for beat in status.workers):
        return
    if status.loading:
        one = status.loading[0]
        note(f"no worker serves queue {name} yet: {printable(one.worker)} loads {printable(one.model)}")
    else:
        note(f"no worker serves queue {name} yet: start `millstream worker --model M{_option(name)}`")


def _option(queue: str) -> str:
    """What a command for this queue needs beside its words."""
    return "" if queue == "default" else f" --queue {queue}"


def show(choices: Sequence[Choice]) -> None:
    """The text of each choice; from the second on, under a line that numbers it as events and results do."""
    for choice in choices:
        if choice.index:
            print(_header(choice.index))
        print(choice.text)


def follow(client: Client, job: JobHandle, as_json: bool) -> int:
    """Show a job's events as they come, to the end; the exit code."""
    from broker.watch import follow as events
    from producer.reach import faults_in_one_line

    end = None
    text = _Text()
    with faults_in_one_line(client.url):
        for event in events(client.queue, job.id, _PauseNote(client, job).look):
            if as_json:
                print(event.model_dump_json(exclude_none=True), flush=True)
            elif event.type == "token":
                text.take(event)
            if event.type != "token":
                end = event
    assert end is not None
    if not as_json:
        text.close()
    if end.type == "done":
        return exits.OK
    code = "" if end.code in (None, end.type) else f"{end.code}: "
    note(f"job {job.id}: {end.type}: {code}{end.message or 'no reason is recorded'}")
    return exits.FAILED


class _PauseNote:
    """Says, once a pause, that a job waits because its queue is paused: nothing else would come."""

    def __init__(self, client: Client, job: JobHandle) -> None:
        self._client = client
        self._job = job
        self._was_told = False

    def look(self) -> None:
        """Ask the server, on the connection that is there."""
        is_paused = self._job.status().state == "queued" and self._client.status().paused
        if is_paused and not self._was_told:
            name = self._client.queue.keys.queue
            note(
                f"queue {name} is paused: job {self._job.id} waits until `millstream queue resume{_option(name)}`"
            )
        self._was_told = is_paused


class _Text:
    """A job's text on stdout: the first choice as it is made, then each other one whole, as `show` would have it.

    Nobody who watches a job knows how many choices it will have.
    """

    def __init__(self) -> None:
        self._first_ended = False
        self._others: dict[int, list[str]] = {}
        self._whole: list[int] = []
        """Choices that have ended and are not shown, in the order in which they ended."""

    def take(self, event: TokenEvent) -> None:
        """Show what can be shown now."""
        if event.choice == 0:
            sys.stdout.write(event.text)
            self._first_ended = event.finish_reason is not None
        else:
            self._others.setdefault(event.choice, []).append(event.text)
            if event.finish_reason is not None:
                self._whole.append(event.choice)
        if self._first_ended:
            self._show_whole()
        sys.stdout.flush()

    def close(self) -> None:
        """Nothing more comes."""
        self._show_whole()
        print(flush=True)

    def _show_whole(self) -> None:
        for choice in self._whole:
            sys.stdout.write(f"\n{_header(choice)}\n{''.join(self._others.pop(choice))}")
        self._whole.clear()


def _header(choice: int) -> str:
    return f"--- choice {choice}"


def describe(state: str, error: JobError | None) -> str:
    """How a job ended, in a line."""
    if error is None:
        return state
    return f"{state}: {error.message}" if error.code == state else f"{state}: {error.code}: {error.message}"
