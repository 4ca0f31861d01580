"""Output and errors of a batch as Parquet, in slices.

types     of the columns that the inputs do not tell: all records are read once
rows      a piece a slice, of whole row groups (growing_table.py); from the first one again where a type does not fit
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from producer.batch.growing_table import Piece, complete, footer
from producer.batch.spooled import START, Place
from producer.bulk.inputs import Inputs
from producer.bulk.manifest import write_durably
from producer.bulk.parquet_output import (
    ANSWERS,
    DoesNotFit,
    Kind,
    SourceRows,
    Table,
    Types,
    arrow_faults,
    batched,
    columns_of,
    table_of,
)
from producer.bulk.records import Record

if TYPE_CHECKING:
    import pyarrow as pa

PIECE_S = 2.0
"""How often it is asked whether to go on."""
RecordsFrom = Callable[[Place, bool | None], Iterator[tuple[Record, Place]]]
"""The records from a place on, with the place after each; the answered ones, the others, or (None) both."""


class Made(BaseModel):
    """How far a file is."""

    place: Place = START
    """In the records, while types are found and then while rows are written."""
    types: str | None = None
    """The schema so far, as Arrow serialises it, in base64."""
    mixed: list[str] = []
    typed: bool = False
    pieces: int = 0
    end: int = 0
    """Bytes of the pieces."""
    complete: bool = False
    """Whether they hold every row."""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class TableFile:
    """One of the two files on its way."""

    kind: Kind
    path: Path
    inputs: Inputs
    records: RecordsFrom
    go_on: Callable[[], bool]

    def write(self) -> bool:
        """Write it; False where `go_on` says no. Again: it goes on.

        Raises:
            OSError: the disk did not take it.
            MillstreamError: Arrow cannot write such rows.
        """
        made = self._made()
        if made.whole:
            return True
        with arrow_faults():
            if not self._write_rows(made):
                return False
        complete(self.path, made.pieces, made.end)
        made.whole = True
        self._save(made)
        for number in range(made.pieces):
            footer(self.path, number).unlink(missing_ok=True)
        return True

    def _table(self, made: Made) -> Table | None:
        read = columns_of(self.inputs)
        if read is not None:
            return self.kind.table(read)
        types = Types(self.kind, _schema_of(made.types), made.mixed)
        if made.typed:
            return types.table()
        due = time.monotonic() + PIECE_S
        for group in batched(self._mine(made.place)):
            types.take([record for record, _ in group])
            if time.monotonic() >= due:
                if not self.go_on():
                    self._keep_types(made, types, group[-1][1], typed=False)
                    return None
                due = time.monotonic() + PIECE_S
        self._keep_types(made, types, START, typed=True)
        return types.table()

    def _keep_types(self, made: Made, types: Types, place: Place, *, typed: bool) -> None:
        made.place, made.typed, made.mixed = place, typed, sorted(types.mixed)
        made.types = base64.b64encode(types.schema.serialize()).decode()
        self._save(made)

    def _write_rows(self, made: Made) -> bool:
        """Write rows until all are written, or `go_on` says no (False)."""
        while not made.complete:
            table = self._table(made)
            if table is None:
                return False
            try:
                made.complete = self._write_piece(made, table)
            except DoesNotFit as fault:
                made.mixed = sorted({*made.mixed, fault.column})
                made.place, made.pieces, made.end = START, 0, 0
                self._save(made)
                continue
            made.pieces += 1
            self._save(made)
            if not made.complete:
                return False
        return True

    def _write_piece(self, made: Made, table: Table) -> bool:
        """Write a piece; whether it is the last."""
        with_source = columns_of(self.inputs) is not None
        source = None
        last = True
        due = time.monotonic() + PIECE_S
        with Piece(self.path, made.pieces, table.schema, made.end) as piece:
            for group in batched(self._mine(made.place)):
                records = [record for record, _ in group]
                if with_source and source is None:
                    source = SourceRows(self.inputs, table, records[0].line - 1)
                piece.write(table_of(table, records, source))
                made.place = group[-1][1]
                if time.monotonic() >= due:
                    if not self.go_on():
                        last = False
                        break
                    due = time.monotonic() + PIECE_S
            made.end = piece.end()
        return last

    def _mine(self, place: Place) -> Iterator[tuple[Record, Place]]:
        return self.records(place, self.kind is ANSWERS)

    @property
    def _state(self) -> Path:
        return self.path.with_name(f"{self.path.name}.json")

    def _made(self) -> Made:
        return Made.model_validate_json(self._state.read_bytes()) if self._state.exists() else Made()

    def _save(self, made: Made) -> None:
        write_durably(self._state, made.model_dump_json().encode())


def _schema_of(types: str | None) -> pa.Schema | None:
    import pyarrow as pa

    return None if types is None else pa.ipc.read_schema(pa.py_buffer(base64.b64decode(types)))
