"""The first slices of a batch: every row is read and checked, and none is asked.

    inputs --> form --> names --> rows, index      rows to ask
                             '--> spool            rows that cannot be asked, with the reason

`checking.json` says how far they are; a slice reads on from there: it skips lines at six million a second, rows of
CSV at 1.2 million, Parquet by row groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from pydantic import BaseModel

from producer.batch.folder import Checked, Folder
from producer.batch.growing import Growing, disk_faults
from producer.batch.names import Names
from producer.batch.outcomes import Outcomes
from producer.batch.rows import RowsWriter
from producer.bulk import records
from producer.bulk.ids import StoppingIds, name_column_of, taken, unnamed
from producer.bulk.intake import Ask, ask
from producer.bulk.lines import BadRow, Line, Row, RowFault, parse
from producer.bulk.manifest import write_durably
from producer.bulk.openai import CHATS, COMPLETIONS
from producer.bulk.openai_output import is_chat
from producer.bulk.spool import encoded

PIECE_S = 2.0
"""What is found is made durable this often."""


class Looked(BaseModel):
    """How far validation is."""

    after: int = 0
    """The position of the last row that was looked at."""
    rows: int = 0
    rows_end: int = 0
    bad: int = 0
    bad_end: int = 0
    """Rows to ask and rows that cannot be, and how long their files are."""
    endpoint: str = ""
    named: bool = False
    """Whether a row has told in which column names are."""
    name_column: str | None = None
    stopping: StoppingIds = StoppingIds()
    torn: list[str] = []


def validate(folder: Folder, go_on: Callable[[str], bool]) -> Checked | None:
    """Check rows until all are checked, or `go_on` says no (None). Durable on return; again: it goes on.

    Args:
        go_on: called every few seconds, with how far it is.

    Raises:
        Refused: an input cannot be read as what it is, or its rows' names stop the run.
        MillstreamError: the disk did not take it; nothing is lost.
    """
    if folder.was_checked:
        return folder.checked()
    inputs = folder.places().inputs
    with disk_faults(folder.path), closing(_Look(folder)) as look:
        due = time.monotonic() + PIECE_S
        for line in inputs.rows(look.so_far.after):
            look.take(line)
            if time.monotonic() >= due:
                look.save(inputs.torn)
                if not go_on(f"{look.so_far.rows + look.so_far.bad:,} rows are checked"):
                    return None
                due = time.monotonic() + PIECE_S
        look.save(inputs.torn)
        return look.end()


class _Look:
    """A look at rows, one after the other."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._state = folder.path / "checking.json"
        self.so_far = Looked()
        if self._state.exists():
            self.so_far = Looked.model_validate_json(self._state.read_bytes())
        self._torn = self.so_far.torn
        self._manifest = folder.manifest()
        self._requests = folder.requests(self._manifest)
        self._bad_ids = folder.order().bad_ids
        self._rows = RowsWriter(folder.rows, folder.index, self.so_far.rows, self.so_far.rows_end)
        self._spool = Growing(folder.places().spool, self.so_far.bad_end)
        self._names = Names(folder.names)

    def take(self, line: Line | BadRow) -> None:
        """Keep a row among those to ask, or among those that cannot be asked."""
        asked = self._with_name(line, ask(line, self._requests))
        if isinstance(asked, Ask):
            assert isinstance(line, Line)
            self._rows.add(line)
            self.so_far.endpoint = self.so_far.endpoint or self._endpoint(asked)
        else:
            self._spool.write(encoded(records.of_bad_row(asked)))
            self.so_far.bad += 1
        self.so_far.after = line.number

    def save(self, torn: list[str]) -> None:
        """Return once everything that was taken is durable, and how far that is."""
        self._rows.sync()
        self._spool.sync()
        self._names.save()
        self.so_far.rows, self.so_far.rows_end = self._rows.count, self._rows.end
        self.so_far.bad_end = self._spool.end
        self.so_far.torn = list(dict.fromkeys([*self._torn, *torn]))
        write_durably(self._state, self.so_far.model_dump_json().encode())

    def end(self) -> Checked:
        """What was found; durable on return.

        Raises:
            Refused: names stop the run.
        """
        so_far, folder = self.so_far, self._folder
        so_far.stopping.refuse()
        Outcomes.create(folder.outcomes, so_far.bad_end)
        checked = Checked(
            rows=so_far.rows,
            bad=so_far.bad,
            bad_end=so_far.bad_end,
            endpoint=so_far.endpoint,
            torn=so_far.torn,
        )
        folder.found(checked)
        folder.names.unlink()
        return checked

    def close(self) -> None:
        """Close the files."""
        self._rows.close()
        self._spool.close()
        self._names.close()

    def _with_name(self, line: Line | BadRow, asked: Ask | BadRow) -> Ask | BadRow:
        """The same; but a row without a name of its own cannot be asked, or stops the run."""
        row = asked.row if isinstance(asked, Ask) else _row_of(line)
        if row is None:
            return asked
        so_far = self.so_far
        if not so_far.named:
            so_far.named, so_far.name_column = True, name_column_of(row, self._manifest.id_column)
        if so_far.name_column is None:
            return asked
        fault = self._fault(row, so_far.name_column)
        if fault is None:
            return asked
        if self._bad_ids == "rows":
            return row.bad(RowFault.INVALID_ID, fault)
        so_far.stopping.take(row, fault)
        return asked

    def _fault(self, row: Row, column: str) -> str | None:
        fault = unnamed(row, column)
        if fault is not None:
            return fault
        first = self._names.claim(row.columns[column], row.line)
        return None if first == row.line else taken(column, first)

    def _endpoint(self, asked: Ask) -> str:
        return CHATS if is_chat(asked.row.columns, self._manifest.wording) else COMPLETIONS


def _row_of(line: Line | BadRow) -> Row | None:
    row = parse(line) if isinstance(line, Line) else line
    return row if isinstance(row, Row) else None
