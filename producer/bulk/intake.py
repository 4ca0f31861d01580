"""What of the input is to do: a job to submit for each line that is not done, or a record that says why not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from producer.bulk import records
from producer.bulk.inputs import Inputs
from producer.bulk.lines import BadRow, Line, Row, parse
from producer.bulk.progress import Counts
from producer.bulk.records import Record
from producer.bulk.requests import Asked, Requests
from producer.bulk.spool import Spool
from protocol import Job, RequestError


class Ask(msgspec.Struct, frozen=True):
    """A row and its job."""

    row: Row
    asked: Asked
    size: int
    """Bytes of its line."""

    @property
    def job(self) -> Job:
        """The job, read back."""
        return self.asked.job


def to_do(
    inputs: Inputs, spool: Spool, requests: Requests, counts: Counts, unusable: Mapping[int, BadRow]
) -> Iterator[Ask | Record]:
    """The lines without a record in the spool, in order; the spool forgets lines that the input has no more.

    Args:
        unusable: rows that cannot be asked whatever they hold, by position.
    """
    last = 0
    for line in inputs.rows():
        if line.number > last + 1:
            spool.drop(last + 1, line.number)
        last = line.number
        held = spool.holds(line.number, line.digest) if line.number in spool else None
        if held is None:
            asked = ask(unusable.get(line.number, line), requests)
            yield records.of_bad_row(asked) if isinstance(asked, BadRow) else asked
            continue
        counts.kept += 1
        counts.answered += held
        counts.failed += not held
    spool.drop(last + 1)


def ask(line: Line | BadRow, requests: Requests) -> Ask | BadRow:
    """The job of a line, or what is wrong with it."""
    if isinstance(line, BadRow):
        return line
    row = parse(line)
    if isinstance(row, BadRow):
        return row
    try:
        return Ask(row, requests.asked(row), len(line.raw))
    except RequestError as error:
        return row.bad(error.code, error.message)
