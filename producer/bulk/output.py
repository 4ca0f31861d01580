"""The output file and the error file, made of the spool."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from producer.bulk.lines import where
from producer.bulk.manifest import CHUNK, FileState, Manifest, Seen, sync_folder
from producer.bulk.openai_output import OpenAILines
from producer.bulk.parquet_output import write_answers, write_errors
from producer.bulk.places import Places
from producer.bulk.records import Record, is_cut
from producer.bulk.spool import Spool
from protocol import MillstreamError

_ROW = struct.Struct("<Q?8s")
"""A row in the file `rows`: position, answered, digest of the input line."""


@dataclass(slots=True)
class Totals:
    """What stands in the two files."""

    answered: int = 0
    cut: int = 0
    """Of these, rows with a choice that ended by `max_tokens`, or the context."""
    failed: dict[str, int] = field(default_factory=dict)
    """Rows in the error file, by code."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first of each: `line N: message`, with the name of the file where there are several."""


@dataclass(frozen=True, slots=True)
class Published:
    """The files as they were written."""

    output: FileState
    errors: FileState
    totals: Totals


class _Fresh:
    """A file that takes the place of another once it is whole; it keeps count of what goes in."""

    def __init__(self, place: Path, folder: Path) -> None:
        self._place = place
        self._path = folder / f"{place.name}.new"
        self._file = self._path.open("wb")
        self._seen = Seen()
        self._pending = bytearray()

    def write(self, data: bytes) -> None:
        self._pending += data
        if len(self._pending) >= CHUNK:
            self._write_pending()

    def _write_pending(self) -> None:
        self._file.write(self._pending)
        self._seen.take(self._pending)
        self._pending.clear()

    def written_by(self, write: Callable[[Path], None]) -> None:
        """Let somebody else write the file at its path, whole."""
        write(self._path)
        self._seen = Seen.of(self._path)

    def sync(self) -> FileState:
        self._write_pending()
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._seen.state

    def take_place(self) -> None:
        self._path.replace(self._place)

    def close(self) -> None:
        self._file.close()


def publish(spool: Spool, places: Places, manifest: Manifest) -> Published:
    """Write output, errors and `rows`; each takes its place only when all three are whole and durable.

    Args:
        manifest: says in which format and order, and what OpenAI's lines tell of the run.

    Raises:
        MillstreamError: the disk did not take them; the files that were there are untouched.
    """
    totals = Totals()
    records = spool.records if manifest.order == "input" else spool.as_finished
    as_tables = manifest.format == "parquet"
    line_of = OpenAILines(manifest).line if manifest.format == "openai" else _plain_line
    try:
        with ExitStack() as stack:
            files = [_Fresh(place, places.folder) for place in (places.errors, places.rows, places.output)]
            for file in files:
                stack.callback(file.close)
            errors, rows, output = files
            for record in records():
                if not as_tables:
                    (output if record.answered else errors).write(line_of(record) + b"\n")
                rows.write(_ROW.pack(record.line, record.answered, bytes.fromhex(record.digest)))
                _count(totals, record)
            if as_tables:
                _write_tables(records, places, output, errors)
            states = [file.sync() for file in files]
            for file in files:
                file.take_place()
        sync_folder(places.output.parent)
        sync_folder(places.folder)
    except OSError as error:
        raise MillstreamError(
            f"cannot write {places.output}: {error.strerror}. What is done is kept: make room, "
            "and run the same command again"
        ) from None
    return Published(states[2], states[0], totals)


def _plain_line(record: Record) -> bytes:
    return record.payload


def _write_tables(
    records: Callable[[], Iterator[Record]], places: Places, output: _Fresh, errors: _Fresh
) -> None:
    def answered() -> Iterator[Record]:
        return (record for record in records() if record.answered)

    def failed() -> Iterator[Record]:
        return (record for record in records() if not record.answered)

    output.written_by(lambda path: write_answers(path, answered, places.inputs))
    errors.written_by(lambda path: write_errors(path, failed, places.inputs))


def published(places: Places) -> Iterator[Record]:
    """The records of a complete run in the order of its files, read back from their plain JSON lines. An error file
    that is gone had none."""
    with ExitStack() as stack:
        rows, output = (stack.enter_context(path.open("rb")) for path in (places.rows, places.output))
        errors = stack.enter_context(places.errors.open("rb")) if places.errors.exists() else io.BytesIO()
        while packed := rows.read(_ROW.size):
            line, answered, digest = _ROW.unpack(packed)
            payload = (output if answered else errors).readline()
            yield Record(line, digest.hex(), answered, payload.removesuffix(b"\n"))


def _count(totals: Totals, record: Record) -> None:
    if record.answered:
        totals.answered += 1
        totals.cut += is_cut(record)
        return
    entry: dict[str, Any] = json.loads(record.payload)
    error = entry["error"]
    code = error["code"]
    totals.failed[code] = totals.failed.get(code, 0) + 1
    totals.examples.setdefault(code, f"{where(entry.get('file'), entry['line'])}: {error['message']}")
