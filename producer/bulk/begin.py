"""How a run begins: anew, where an earlier one of the same command stopped, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from producer.bulk import foreign, output
from producer.bulk.manifest import FileState, Finished, Manifest
from producer.bulk.places import Places
from producer.bulk.records import Record
from producer.bulk.spool import Spool
from producer.refusal import Refused

_AT_ONCE = 1000


def begin(places: Places, asked: Manifest, *, resume: bool, overwrite: bool) -> Manifest | Finished:
    """The run to go on with, its manifest and spool in place, or the end of one that is complete already.

    Raises:
        Refused: the output belongs to something else, or to a run that was asked differently.
    """
    if overwrite:
        return _anew(places, asked)
    found = Manifest.load(places.manifest)
    if found is None:
        return _beside_foreign_output(places, asked, resume)
    if found.finished is None:
        nothing_done = not places.spool.exists() or places.spool.stat().st_size == 0
        if nothing_done and found.differences(asked):
            return _anew(places, asked)  # a mistake in the command, corrected
        return _same_question(places, found, asked)
    return _after_the_end(places, found, found.finished, asked, resume)


def _anew(places: Places, asked: Manifest) -> Manifest:
    places.spool.unlink(missing_ok=True)
    asked.save(places.manifest)
    return asked


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
    places: Places, found: Manifest, finished: Finished, asked: Manifest, resume: bool
) -> Manifest | Finished:
    """A complete run: nothing to do, unless rows of the input were changed or added, or its files were."""
    if not places.output.exists() or not places.errors.exists():
        return _anew(places, asked)
    if (FileState.of(places.output), FileState.of(places.errors)) != (finished.output, finished.errors):
        if resume:
            return _from_records(places, asked, foreign.answers(places.inputs, places.output))
        raise Refused(
            f"{places.output} or its error file was changed since the run that wrote it: choose another output, "
            "--resume to go by the rows that are in it, or --overwrite"
        )
    _same_question(places, found, asked)
    if places.inputs.state() == finished.source:
        return finished
    going_on = found.model_copy(update={"finished": None})
    if places.spool.exists():  # kept where the files are Parquet
        going_on.save(places.manifest)
        return going_on
    return _from_records(places, going_on, output.published(places))


def _same_question(places: Places, found: Manifest, asked: Manifest) -> Manifest:
    if differences := found.differences(asked):
        raise Refused(
            f"{places.output} has answers that were asked for differently ({'; '.join(differences)}): "
            "ask as before, choose another output, or --overwrite"
        )
    return found


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
