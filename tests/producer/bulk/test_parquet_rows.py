"""Parquet as input; F12."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from producer.bulk.lines import Line, Row, parse
from producer.bulk.requests import Requests
from tests.producer.bulk.orders import read_rows
from tests.producer.bulk.reading import columns_of, rows_of
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program

DATA = Path(__file__).parents[1] / "data"


def test_parquet_becomes_strict_json() -> None:
    table = pq.read_table(DATA / "F12.parquet")
    rows = columns_of(DATA / "F12.parquet")
    assert len(rows) == table.num_rows
    first = rows[0]
    assert first["price"] == "1.10"
    assert first["big"] == 9223372036854775807
    assert {row["score"] for row in rows} & {None} == {None}
    stamps = [stamp for stamp in table["ts"].to_pylist() if stamp is not None]
    assert stamps[0].isoformat() in {row["ts"] for row in rows}
    assert all(isinstance(row["blob"], str | None) for row in rows)
    io.StringIO(json.dumps(rows, allow_nan=False))


def test_what_a_schema_fills_in_is_not_rendered(program: Program, url: str, tmp_path: Path) -> None:
    requests = Requests("run", {}, None)
    parsed = [parse(row) for row in rows_of(DATA / "F12.parquet") if isinstance(row, Line)]
    jobs = [requests.asked(row).job for row in parsed[:2] if isinstance(row, Row)]
    for job in jobs:
        for turn in job.messages or ():
            assert (
                None
                not in {
                    name: value
                    for name, value in turn.model_dump(exclude_unset=True).items()
                    if name != "content"
                }.values()
            )
    with FakeWorker(url):
        done = program("generate", DATA / "F12.parquet", "-o", tmp_path / "out.jsonl")
    assert done.returncode == 3
    errors = read_rows(tmp_path / "out.errors.jsonl")
    assert [row["line"] for row in errors] == [3, 4]


def test_times_that_python_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    stamps = pa.array([1, None], pa.timestamp("ns"))
    pq.write_table(pa.table({"prompt": ["a", "b"], "at": stamps}), path)
    assert [row["at"] for row in columns_of(path)] == ["1970-01-01T00:00:00.000000001", None]
