"""Slices that are short, and slices that die: the files are those of `generate`, whatever input and format."""

from __future__ import annotations

import errno
import gzip
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from broker import batches
from producer.batch import asking, finalising, slices, spooled, tables, validating
from producer.batch.outcomes import opened
from producer.batch.slices import Slice
from producer.bulk import parquet_output
from producer.bulk.generate import generate
from producer.bulk.inputs import find_inputs
from producer.bulk.interrupt import Interrupt
from producer.bulk.manifest import Manifest
from producer.bulk.spool import decoded
from protocol import MillstreamError
from tests.producer.batch.setup import ROWS, Bench, Death
from tests.producer.bulk.orders import order, write_rows
from tests.producer.fake_worker import FakeWorker

BAD = {"custom_id": "bad", "prompt": 3, "max_tokens": 4}


def lines(folder: Path) -> list[Path]:
    first = {**ROWS[0], "big": 2**53 + 1, "none": {}}
    last = {**ROWS[7], "seed": 1, "x": [None, 2.5], "big": 0.5, "none": None}
    return [write_rows(folder / "in.jsonl", [BAD, first, *ROWS[1:7], BAD, last])]


def mixed(folder: Path) -> list[Path]:
    (folder / "b.csv.gz").write_bytes(
        gzip.compress(b"custom_id,prompt,max_tokens\n1,one,4\n2,,\n3,three,\n\n4,x")
    )
    return [*lines(folder), folder / "b.csv.gz"]


def parquet(folder: Path) -> list[Path]:
    columns = {
        "custom_id": [f"{n}" for n in range(9)],
        "prompt": ["a", None, *"bcdefgh"],
        "n": pa.array([7] * 9, "int8"),
    }
    pq.write_table(pa.table(columns), folder / "in.parquet", row_group_size=4)
    return [folder / "in.parquet"]


def requests(folder: Path) -> list[Path]:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    rows: list[dict[str, Any]] = [{"custom_id": f"r{n}", **line} for n in range(5)]
    rows[2] = {**rows[2], "body": {}}
    return [write_rows(folder / "in.jsonl", [*rows, {**line, "custom_id": "r1"}, {**line, "custom_id": ""}])]


FORMATS = ["jsonl", "openai", "parquet"]


def pairs(some: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """All of them; the first one in the quick suite, the rest in the long one."""
    first, *rest = product(some, others)
    return [first, *(pytest.param(*pair, marks=pytest.mark.long) for pair in rest)]


@pytest.fixture
def short(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A slice does as little as it can."""
    monkeypatch.setattr(slices, "LONGEST_S", 0.0)
    monkeypatch.setattr(slices, "SHORTEST_S", 0.0)
    monkeypatch.setattr(validating, "PIECE_S", 0.0)
    monkeypatch.setattr(finalising, "PIECE_S", 0.0)
    monkeypatch.setattr(tables, "PIECE_S", 0.0)
    monkeypatch.setattr(parquet_output, "AT_ONCE", 2)
    monkeypatch.setattr(asking, "NOTE_EVERY_S", 0.0)
    return bench


def generated(bench: Bench, sources: list[Path], format: str, **changes: Any) -> tuple[bytes, bytes]:
    """Output and errors of `generate`."""
    ending = "parquet" if format == "parquet" else "jsonl"
    output = bench.folder / f"out.{ending}"
    asked = order(sources[0], output, bench.url, inputs=find_inputs(list(map(str, sources))), format=format)
    generate(replace(asked, **changes), Interrupt())
    return output.read_bytes(), output.with_name(f"out.errors.{ending}").read_bytes()


def written(bench: Bench, batch_id: str) -> tuple[bytes, bytes]:
    batch = bench.show(batch_id)
    return Path(batch.output).read_bytes(), Path(batch.error_file).read_bytes()


@pytest.fixture(autouse=True)
def _one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run begins at the same second: it stands in OpenAI's lines."""
    new = Manifest.new
    monkeypatch.setattr(
        Manifest, "new", lambda *args, **kwargs: new(*args, **kwargs).model_copy(update={"created": 1})
    )


@pytest.mark.parametrize(("sources", "format"), pairs([mixed, lines, parquet, requests], FORMATS))
def test_in_slices_of_a_row_the_files_are_those_of_generate(
    short: Bench, sources: Callable[[Path], list[Path]], format: str
) -> None:
    files = sources(short.folder)
    batch_id = short.submit(*files, format=format, bad_ids="rows")
    with FakeWorker(short.url):
        number = short.go(batch_id)
        expected = generated(short, files, format, bad_ids="rows")
    assert written(short, batch_id) == expected
    assert short.status(batch_id) == "completed"
    assert number > short.show(batch_id).total


@pytest.mark.parametrize(
    "format", ["parquet", *(pytest.param(one, marks=pytest.mark.long) for one in FORMATS[:2])]
)
def test_in_the_order_of_their_ends_no_row_comes_twice(short: Bench, format: str) -> None:
    files = mixed(short.folder)
    batch_id = short.submit(*files, format=format, row_order="completion", bad_ids="rows")
    with FakeWorker(short.url):
        short.go(batch_id)
        expected = generated(short, files, format, row_order="completion", bad_ids="rows")
    assert [in_any_order(file, format) for file in written(short, batch_id)] == [
        in_any_order(file, format) for file in expected
    ]


def in_any_order(file: bytes, format: str) -> list[Any]:
    rows = pq.read_table(pa.BufferReader(file)).to_pylist() if format == "parquet" else file.splitlines()
    return sorted(rows, key=repr)


def test_the_records_of_one_file_are_found_without_reading_the_others(bench: Bench) -> None:
    batch_id = bench.submit(*lines(bench.folder))
    with FakeWorker(bench.url):
        bench.slice()
        bench.slice()
    folder = bench.path(batch_id)
    with opened(folder) as (outcomes, rows), pytest.MonkeyPatch.context() as patch:
        read = []
        patch.setattr(spooled, "decoded", lambda raw: read.append(raw) or decoded(raw))
        for answered, count in [(True, 8), (False, 2)]:
            found = [record for record, _ in spooled.spooled(folder, outcomes, rows, spooled.START, answered)]
            assert [record.answered for record in found] == [answered] * count
            assert len(read) == count
            read.clear()


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The n-th process dies after its n-th step towards the disk, or before it, in turns."""
    steps = deaths = 0

    def mortal(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps, deaths
            steps += 1
            dies = steps > deaths
            if dies:
                steps, deaths = 0, deaths + 1
                if deaths % 2:
                    raise Death
            done = call(*args, **kwargs)
            if dies:
                raise Death
            return done

        return step

    with monkeypatch.context() as patch:
        for owner, name in [
            (os, "fsync"),
            (os, "fdatasync"),
            (os, "ftruncate"),
            (Path, "replace"),
            (Path, "unlink"),
        ]:
            patch.setattr(owner, name, mortal(getattr(owner, name)))
        patch.setattr(Slice, "_note", mortal(Slice._note))
        patch.setattr(Slice, "_advance", mortal(Slice._advance))
        yield
    assert deaths > 20


@pytest.mark.parametrize(("ending", "format"), pairs(["completed", "cancelled", "expired"], FORMATS))
def test_wherever_slices_die_the_files_are_those_of_generate(
    short: Bench, monkeypatch: pytest.MonkeyPatch, ending: str, format: str
) -> None:
    files = mixed(short.folder)
    batch_id = short.submit(*files, format=format)
    client: Any = short.queue.client
    if ending == "expired":
        client.hset(short.keys.batch(batch_id), "expires_at", 1)
    elif ending == "cancelled":
        short.queue.run(batches.cancel(short.keys, batch_id))
    with FakeWorker(short.url):
        with dying(monkeypatch):
            short.go(batch_id)
        expected = generated(short, files, format)
    assert short.status(batch_id) == ending
    output, errors = written(short, batch_id)
    if ending == "completed":
        assert (output, errors) == expected
    left = {path.name for path in short.path(batch_id).path.rglob("*") if path.is_file()}
    assert left == {
        *("order.json", "checked.json", "ended.json", "lock", "manifest.json", "input-0", "input-1"),
        *(Path(place).name for place in (short.show(batch_id).output, short.show(batch_id).error_file)),
    }


@pytest.mark.long
@pytest.mark.parametrize("format", FORMATS)
def test_a_disk_that_is_full_now_and_then_costs_nothing(
    short: Bench, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    files = mixed(short.folder)
    batch_id = short.submit(*files, format=format)
    faults: list[str] = []

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with FakeWorker(short.url):
        while not short.show(batch_id).has_ended:
            with monkeypatch.context() as patch:
                for name in ("fsync", "fdatasync"):
                    patch.setattr(os, name, full)
                with pytest.raises((MillstreamError, OSError)) as fault:
                    Slice(short.queue, short.chain, batch_id, short.show(batch_id).slice).work()
                faults.append(str(fault.value))
            short.go(batch_id, 1)
        assert written(short, batch_id) == generated(short, files, format)
    assert short.status(batch_id) == "completed"
    assert all("No space left on device" in fault for fault in faults)


@pytest.mark.long
@pytest.mark.parametrize("ending", ["cancelled", "expired"])
def test_whenever_a_batch_is_to_stop_every_row_has_an_outcome(short: Bench, ending: str) -> None:
    source = lines(short.folder)
    client: Any = short.queue.client
    endings: list[str] = []
    with FakeWorker(short.url):
        for slices_before in range(0, 40, 4):
            batch_id = short.submit(*source, window=2)
            short.go(batch_id, slices_before)
            before = short.status(batch_id)
            if ending == "expired":
                client.hset(short.keys.batch(batch_id), "expires_at", 1)
            else:
                answer = short.queue.run(batches.cancel(short.keys, batch_id))
                assert answer == ("cancelling" if before in ("validating", "in_progress") else before)
            short.go(batch_id)
            endings.append(short.status(batch_id))
            assert endings[-1] == (ending if before in ("validating", "in_progress") else "completed")
            answers, errors = short.files(batch_id)
            assert len(answers) + len(errors) == short.show(batch_id).total == 10
            codes = {error["error"]["code"] for error in errors}
            assert codes <= {"invalid_request", f"batch_{ending}"}
            assert client.keys(f"{short.keys.base}*{batch_id}.*") == []
    assert set(endings) == {ending, "completed"}
