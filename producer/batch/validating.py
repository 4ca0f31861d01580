"""The first slice of a batch: every row is read and checked, and none is asked.

    inputs --> names --> form --> rows, index      rows to ask
                           '----> spool            rows that cannot be asked, with the reason

It begins anew if it is interrupted: nothing but its own files changes before it ends.
"""

from __future__ import annotations

from producer.batch.folder import BatchOrder, Checked, Folder
from producer.batch.outcomes import Outcomes
from producer.batch.rows import RowsWriter
from producer.bulk import records
from producer.bulk.ids import as_errors, refuse_bad_ids
from producer.bulk.inputs import Inputs
from producer.bulk.intake import Ask, ask
from producer.bulk.lines import BadRow, Line
from producer.bulk.openai import CHATS, COMPLETIONS
from producer.bulk.openai_output import is_chat
from producer.bulk.records import Record
from producer.bulk.spool import Spool

BAD_AT_ONCE = 1000


def validate(folder: Folder) -> Checked:
    """Check every row; durable on return.

    Raises:
        Refused: an input cannot be read as what it is, or its rows' names stop the run.
        MillstreamError: the disk did not take it.
    """
    order, manifest, places = folder.order(), folder.manifest(), folder.places()
    inputs, requests = places.inputs, folder.requests(manifest)
    unusable = _check_ids(inputs, order, manifest.id_column)
    places.spool.unlink(missing_ok=True)
    bad: list[Record] = []
    failed, endpoint = 0, ""
    with Spool(places.spool) as spool, RowsWriter(folder.rows, folder.index) as rows:
        for line in inputs.rows():
            asked = ask(unusable.get(line.number, line), requests)
            if isinstance(asked, Ask):
                assert isinstance(line, Line)
                rows.add(line)
                endpoint = endpoint or (
                    CHATS if is_chat(asked.row.columns, manifest.wording) else COMPLETIONS
                )
                continue
            bad.append(records.of_bad_row(asked))
            failed += 1
            if len(bad) == BAD_AT_ONCE:
                spool.append(bad)
                bad.clear()
        spool.append(bad)
    Outcomes.create(folder.outcomes, places.spool)
    checked = Checked(rows=rows.count, bad=failed, endpoint=endpoint, torn=list(inputs.torn))
    folder.found(checked)
    return checked


def _check_ids(inputs: Inputs, order: BatchOrder, column: str | None) -> dict[int, BadRow]:
    if order.bad_ids == "rows":
        return as_errors(inputs, column)
    refuse_bad_ids(inputs, column)
    return {}
