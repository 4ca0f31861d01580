"""Slices in which a batch runs: rows that are to do are asked, what ended is kept. Any number of them, one at a time.

A slice that is over leaves its rows on the queue. The next one admits them first, since they are to do, and finds
them submitted; what ended meanwhile waits in the run's stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from broker.queue import Queue
from producer.batch.folder import Folder
from producer.batch.outcomes import Outcomes
from producer.batch.rows import Rows
from producer.bulk import records
from producer.bulk.intake import Ask, ask
from producer.bulk.lines import BadRow
from producer.bulk.plan import planned
from producer.bulk.progress import Counts
from producer.bulk.records import Record
from producer.bulk.requests import Requests
from producer.bulk.run import Outlook, Run, Served
from producer.bulk.window import Window

NOTE_EVERY_S = 1.0


class Told:
    """Takes what a run says to its user; the last of it is what holds a batch up."""

    def __init__(self) -> None:
        self.text = ""

    def show(self, counts: Counts) -> None:
        """Counts go to the batch's hash."""

    def note(self, text: str) -> None:
        """Keep it."""
        self.text = text

    def close(self) -> None:
        """Nothing to take off."""


def run_rows(
    folder: Folder, queue: Queue, outcomes: Outcomes, rows: Rows, go_on: Callable[[str], bool]
) -> bool:
    """Ask and collect until every row is done (True), or `go_on` says no.

    Args:
        go_on: called about once a second, with what holds the run up.

    Raises:
        redis.RedisError: the server could not be reached; nothing is lost.
        MillstreamError: the disk is full, or another model answers now; nothing is lost.
    """
    order, manifest = folder.order(), folder.manifest()
    requests = folder.requests(manifest)
    to_do = _to_do(rows, outcomes, requests)
    told = Told()
    window = Window(queue, manifest.run, order.window)
    run = Run(
        planned(to_do) if order.plan else to_do,
        window,
        outcomes,
        Counts(len(rows)),
        told,
        Served(manifest, folder.places()),
        Outlook(queue, told, own_worker=False),
    )
    noted = time.monotonic()
    while run.step():
        if time.monotonic() - noted >= NOTE_EVERY_S:
            noted = time.monotonic()
            if not go_on(told.text):
                window.leave()
                return False
    return True


def _to_do(rows: Rows, outcomes: Outcomes, requests: Requests) -> Iterator[Ask | Record]:
    number = outcomes.next_to_do(0)
    while number is not None:
        asked = ask(rows[number], requests)
        yield records.of_bad_row(asked) if isinstance(asked, BadRow) else asked
        number = outcomes.next_to_do(number + 1)
