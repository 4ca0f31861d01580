"""What of the input is to do: a job to submit for each line that is not done, or a record that says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from producer.bulk import records
from producer.bulk.ids import Unusable
from producer.bulk.inputs import Inputs
from producer.bulk.lines import BadRow, Line, Row, RowFault, parse
from producer.bulk.progress import Counts
from producer.bulk.records import Record
from producer.bulk.requests import Requests, RowJob
from producer.bulk.spool import Spool
from protocol import Job, RequestError


class Ask(msgspec.Struct, frozen=True):
    """A row and its job."""

    row: Row
    row_job: RowJob
    size: int
    """Bytes of its line."""

    @property
    def job(self) -> Job:
        """The job, read back."""
        return self.row_job.job


def to_do(
    inputs: Inputs, spool: Spool, requests: Requests, counts: Counts, unusable: Unusable
) -> Iterator[Ask | Record]:
    """The lines without a record in the spool, in order; the spool forgets lines that the input has no more.

    Args:
        unusable: rows that cannot be asked whatever they hold.
    """
    last = 0
    for line in inputs.rows():
        if line.number > last + 1:
            spool.drop(last + 1, line.number)
        last = line.number
        fault = unusable.fault(line)
        held = _held(line, fault, spool)
        if held is None:
            asked = fault or ask(line, requests)
            yield records.of_bad_row(asked) if isinstance(asked, BadRow) else asked
            continue
        counts.kept += 1
        counts.answered += held
        counts.failed += not held
    spool.drop(last + 1)


def _held(line: Line | BadRow, fault: BadRow | None, spool: Spool) -> bool | None:
    """Whether a line is done, as `Spool.holds` says it. But whether its name is its own depends on other lines, which
    may have been edited since it was stored: that is judged by what they say now (`fault`)."""
    held = spool.holds(line.number, line.digest) if line.number in spool else None
    if fault is not None:
        said = held is False and spool.record(line.number) == records.of_bad_row(fault)
        return False if said else None
    if held is False and records.error_code(spool.record(line.number)) == RowFault.INVALID_ID:
        return None
    return held


def before_asking(do: Callable[[], None], rows: Iterator[Ask | Record]) -> Iterator[Ask | Record]:
    """The same rows; `do` is called before the first that is to be asked, if there is one."""
    for row in rows:
        if isinstance(row, Ask):
            do()
            yield row
            break
        yield row
    yield from rows


def ask(line: Line | BadRow, requests: Requests) -> Ask | BadRow:
    """The job of a line, or what is wrong with it."""
    if isinstance(line, BadRow):
        return line
    row = parse(line)
    if isinstance(row, BadRow):
        return row
    try:
        return Ask(row, requests.row_job(row), len(line.raw))
    except RequestError as error:
        return row.bad(error.code, error.message)
