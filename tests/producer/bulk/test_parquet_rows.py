"""Parquet as input; F12."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from producer.bulk.lines import BadRow, Line, Row, parse
from producer.bulk.requests import Requests
from producer.refusal import Refused
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
    jobs = [requests.row_job(row).job for row in parsed[:2] if isinstance(row, Row)]
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


def test_times_after_the_year_9999_are_written_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    late = {"s": 1 << 38, "ms": 1 << 48, "us": 1 << 58}
    columns = {unit: pa.array([0, when], pa.timestamp(unit)) for unit, when in late.items()}
    zoned = pa.array([0, 253_402_300_799], pa.timestamp("s", "Europe/Berlin"))
    dates = pa.array([0, 10**7], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({**columns, "zoned": zoned, "dates": dates}), path)
    first, last = columns_of(path)
    assert set(first) == {"s", "ms", "us", "zoned", "dates"}
    assert first["dates"] == "1970-01-01"
    assert last["dates"] == "29349-01-26"
    assert str(last["zoned"]).startswith("10000-01-01T00:59:59")
    assert all("T" in str(last[unit]) and str(last[unit])[:4] >= "1068" for unit in ("s", "ms", "us"))


BAD_VALUES = {
    "text": pa.array([b"good", b"\xff", None]).view(pa.string()),
    "texts": pa.ListArray.from_arrays([0, 1, 2, 3], pa.array([b"good", b"\xff", b""]).view(pa.string())),
    "time": pa.array([0, 1 << 62, None], pa.timestamp("ms")),
    "times": pa.StructArray.from_arrays([pa.array([0, 1 << 62, None], pa.timestamp("us"))], ["at"]),
    "duration": pa.array([0, 1 << 62, None], pa.duration("ms")),
}


@pytest.mark.parametrize("column", BAD_VALUES)
def test_a_value_that_cannot_be_read_is_an_error_of_its_row(column: str, tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    names = {"id": ["a", "b", "c"], "prompt": ["one", "two", "three"]}
    pq.write_table(pa.table({**names, column: BAD_VALUES[column]}), path)
    first, bad, last = rows_of(path)
    assert isinstance(first, Line)
    assert isinstance(last, Line)
    assert isinstance(bad, BadRow)
    assert bad.code == ("invalid_utf8" if column in ("text", "texts") else "invalid_row")
    assert bad.message.startswith(f"{column}: ")
    assert (bad.line, bad.custom_id, bad.columns) == (2, "b", {"id": "b", "prompt": "two"})


def test_a_value_that_cannot_be_read_stands_in_the_error_file(
    program: Program, url: str, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "text": BAD_VALUES["text"]}), source)
    with FakeWorker(url):
        assert program("generate", source, "-o", output).returncode == 3
    assert [row["completion"] for row in read_rows(output)] == ["a", "c"]
    (error,) = read_rows(tmp_path / "out.errors.jsonl")
    assert (error["line"], error["error"]["message"]) == (2, "text: a text is not UTF-8")


@pytest.mark.parametrize("unit", ["us", "ns"])
def test_a_time_zone_that_is_not_known_here_is_named(unit: str, tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    times = pa.array([[0]], pa.list_(pa.timestamp(unit, "Mars/Phobos")))
    pq.write_table(pa.table({"at": times}), path)
    with pytest.raises(Refused, match=r"column 'at' has the time zone 'Mars/Phobos'.*install tzdata"):
        rows_of(path)


def test_a_column_whose_name_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"name": ["a"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"name", b"na\xff\xff"))
    with pytest.raises(Refused, match="is not a Parquet file"):
        rows_of(path)
