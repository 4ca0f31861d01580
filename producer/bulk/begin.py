"""How a run begins: anew, where an earlier one of the same command stopped, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from producer.bulk import foreign, output
from producer.bulk.intake import ask
from producer.bulk.lines import BadRow, Line
from producer.bulk.manifest import FileState, Finished, Manifest
from producer.bulk.places import Places
from producer.bulk.records import Record
from producer.bulk.requests import Requests
from producer.bulk.spool import Spool
from producer.refusal import Refused
from protocol import Job

_AT_ONCE = 1000


def begin(
    places: Places, asked: Manifest, *, resume: bool, overwrite: bool, redo_changed: bool
) -> Manifest | Finished:
    """The run to go on with, its manifest and spool in place, or the end of one that is complete already.

    Raises:
        Refused: the output belongs to something else, or to a run that was asked differently.
    """
    found = _found(places, lenient=overwrite or resume)
    if overwrite:
        return _anew(places, asked, found)
    if found is None:
        return _beside_foreign_output(places, asked, resume)
    if found.finished is None:
        nothing_done = not places.spool.exists() or places.spool.stat().st_size == 0
        if nothing_done and found.differences(asked):
            return _anew(places, asked, found)  # a mistake in the command, corrected
        return _go_on(places, found, asked, redo_changed)
    return _after_the_end(places, found, found.finished, asked, resume, redo_changed)


def _anew(places: Places, asked: Manifest, found: Manifest | None = None) -> Manifest:
    """The run as asked, in place of one that was found."""
    asked.superseded = _superseded(found)
    places.spool.unlink(missing_ok=True)
    asked.save(places.manifest)
    return asked


def _found(places: Places, *, lenient: bool) -> Manifest | None:
    """The manifest beside the output; `lenient`: one that is damaged is none.

    Raises:
        Refused: it is damaged.
    """
    try:
        return Manifest.load(places.manifest)
    except Refused:
        if not lenient:
            raise
        return None


def _superseded(found: Manifest | None) -> list[str]:
    return [] if found is None or found.finished else [*found.superseded, found.run]


def _beside_foreign_output(places: Places, asked: Manifest, resume: bool) -> Manifest:
    there = [path for path in (places.output, places.errors) if path.exists() and path.stat().st_size]
    if not there:
        return _anew(places, asked)
    if not resume:
        raise Refused(
            f"{there[0]} exists and is not of this run: choose another output, --resume to keep the rows "
            "that are in it, or --overwrite"
        )
    return _from_records(places, asked, foreign.answers(places.inputs, places.output))


def _after_the_end(
    places: Places, found: Manifest, finished: Finished, asked: Manifest, resume: bool, redo_changed: bool
) -> Manifest | Finished:
    """A complete run: nothing to do, unless rows of the input were changed or added, or its files were, or other ones
    are asked for."""
    if not places.output.exists():
        return _anew(places, asked)
    if not _is_as_written(places, finished):
        if resume:
            return _from_records(places, asked, foreign.answers(places.inputs, places.output))
        raise Refused(
            f"{places.output} or its error file was changed or deleted since the run that wrote it: choose another "
            "output, --resume to go by the rows that are in it, or --overwrite"
        )
    if found.differences(asked):
        if not redo_changed:
            raise _asked_differently(places, found, asked)
    elif found.writes_like(asked) and places.inputs.state() == finished.source:
        return finished
    return _go_on(places, _reopened(places, found), asked, redo_changed)


def _is_as_written(places: Places, finished: Finished) -> bool:
    """Whether both files are as the run left them. An error file without rows says nothing, so it may be gone."""
    if FileState.of(places.output) != finished.output:
        return False
    if not places.errors.exists():
        return finished.failed == 0
    return FileState.of(places.errors) == finished.errors


def _reopened(places: Places, found: Manifest) -> Manifest:
    """A complete run as it was before its end: its rows in a spool."""
    going_on = found.model_copy(update={"finished": None})
    if places.spool.exists():
        going_on.save(places.manifest)
        return going_on
    if found.format != "jsonl":
        raise Refused(
            f"{places.spool} is gone, and the rows of {places.output} are only there as they were asked: choose "
            "another output, or --overwrite"
        )
    return _from_records(places, going_on, output.published(places))


def _go_on(places: Places, found: Manifest, asked: Manifest, redo_changed: bool) -> Manifest:
    """A run that is not complete, asked as before or with what is changed of it."""
    if not found.differences(asked):
        return found.written_like(asked)
    if not redo_changed:
        raise _asked_differently(places, found, asked)
    if found.answered_by() != asked.answered_by():
        return _anew(places, asked, found)
    return _redo(places, found, asked)


def _redo(places: Places, found: Manifest, asked: Manifest) -> Manifest:
    """A new run that keeps the rows which the command's change leaves as they were: those that say themselves what
    was changed, and those that cannot be asked either way."""
    before, now = _requests(found), _requests(asked)
    with Spool(places.spool) as spool:
        for line in places.inputs.rows():
            held = spool.holds(line.number, line.digest) is not None
            if held and _question(line, before) != _question(line, now):
                spool.drop(line.number, line.number + 1)
        asked.served, asked.created = found.served, found.created
        asked.superseded = _superseded(found)
        return _from_records(places, asked, spool.as_finished())


def _requests(manifest: Manifest) -> Requests:
    """What a manifest's command asks, under an id that says nothing of its run."""
    defaults = manifest.params.model_dump(mode="json", exclude_unset=True)
    return Requests("same", defaults, None, manifest.rendering, manifest.wording)


def _question(line: Line | BadRow, requests: Requests) -> Job | BadRow:
    asked = ask(line, requests)
    return asked if isinstance(asked, BadRow) else asked.job


def _asked_differently(places: Places, found: Manifest, asked: Manifest) -> Refused:
    return Refused(
        f"{places.output} has answers that were asked for differently ({'; '.join(found.differences(asked))}): "
        "ask as before, choose another output, --redo-changed to ask the rows again that this changes, or --overwrite"
    )


def _from_records(places: Places, manifest: Manifest, records: Iterator[Record]) -> Manifest:
    """Begin with a spool of rows that are done; it takes its place once it is whole."""
    fresh = places.spool.with_name("spool.new")
    fresh.unlink(missing_ok=True)
    with Spool(fresh) as spool:
        while batch := list(islice(records, _AT_ONCE)):
            spool.append(batch)
    fresh.replace(places.spool)
    manifest.save(places.manifest)
    return manifest
