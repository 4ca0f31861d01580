"""Output as Parquet: the input's columns with their types, and a fixed schema beside them; F11 and F12."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.producer.bulk.orders import write_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program

DATA = Path(__file__).parents[1] / "data"
FIXED = [
    ("completion", pa.string()),
    ("finish_reason", pa.string()),
    ("stop_reason", pa.string()),
    ("prompt_tokens", pa.int64()),
    ("completion_tokens", pa.int64()),
    ("seed", pa.uint64()),
    ("completions", pa.string()),
]


def test_parquet_keeps_the_schema_of_its_input(program: Program, url: str, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    with FakeWorker(url):
        assert program("generate", DATA / "F12.parquet", "-o", output).returncode == 3
    read, answers, errors = map(
        pq.read_table, (DATA / "F12.parquet", output, tmp_path / "out.errors.parquet")
    )
    passed = [field for field in answers.schema if field.name in read.schema.names]
    assert passed == list(read.schema)
    assert [(field.name, field.type) for field in answers.schema][len(passed) :] == FIXED
    ids = [*answers["id"].to_pylist(), *errors["id"].to_pylist()]
    assert sorted(ids) == sorted(read["id"].to_pylist())
    mine = read.filter(pa.compute.is_in(read["id"], answers["id"].combine_chunks()))
    assert answers.select(read.schema.names).equals(
        mine.replace_schema_metadata(answers.schema.metadata)
    ) or [
        repr(row)
        for row in answers.select(read.schema.names).to_pylist()  # NaN is not equal to itself
    ] == [repr(row) for row in mine.to_pylist()]
    assert errors["line"].to_pylist() == [3, 4]


def test_cells_of_csv_are_text_in_parquet(program: Program, url: str, tmp_path: Path) -> None:
    with FakeWorker(url):
        program("generate", DATA / "F11.csv", "-o", tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    assert {table.schema.field(name).type for name in ("id", "prompt", "note")} == {pa.string()}
    assert "003" in table["id"].to_pylist()
    assert table["completion"].to_pylist() == table["prompt"].to_pylist()


def test_types_are_read_off_rows_that_may_not_agree(program: Program, url: str, tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "whole": 1, "mixed": 1, "late": None, "nested": {"x": [1]}},
        {"prompt": "b", "whole": None, "mixed": "one", "late": 2.5, "nested": {"y": "z"}},
        {"prompt": 4.5, "whole": 3},
    ]
    source = write_rows(tmp_path / "in.jsonl", rows)
    with FakeWorker(url) as worker:
        command = ("generate", source, "-o", tmp_path / "out.parquet")
        assert program(*command).returncode == 3
        table = pq.read_table(tmp_path / "out.parquet")
        assert table["whole"].to_pylist() == [1, None]
        assert table["mixed"].to_pylist() == ["1", '"one"']
        assert table["late"].to_pylist() == [None, 2.5]
        assert table["nested"].to_pylist() == [{"x": [1], "y": None}, {"x": None, "y": "z"}]
        errors = pq.read_table(tmp_path / "out.errors.parquet").to_pylist()
        assert [(row["line"], row["code"], row["whole"]) for row in errors] == [(3, "invalid_request", 3)]

        assert program(*command).returncode == 3  # done before, as it ended then
        write_rows(source, [*rows[:2], {"prompt": "c"}])
        assert program(*command).returncode == 0
        assert len(worker.answered) == 3
    assert pq.read_table(tmp_path / "out.parquet")["completion"].to_pylist() == ["a", "b", "c"]


def test_no_rows_make_files_without_rows(program: Program, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("")
    assert program("generate", tmp_path / "in.jsonl", "-o", tmp_path / "out.parquet").returncode == 0
    assert [(field.name, field.type) for field in pq.read_schema(tmp_path / "out.parquet")] == FIXED
    assert pq.read_table(tmp_path / "out.errors.parquet").num_rows == 0


def test_a_foreign_parquet_file_is_left_alone(program: Program, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    pq.write_table(pa.table({"x": [1]}), tmp_path / "out.parquet")
    before = (tmp_path / "out.parquet").read_bytes()
    for flags in ((), ("--resume",)):
        refused = program("generate", source, "-o", tmp_path / "out.parquet", *flags)
        assert refused.returncode == 2
    assert (tmp_path / "out.parquet").read_bytes() == before


@pytest.mark.long
def test_hugging_faces_datasets_loads_it(program: Program, url: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for source in ("F12.parquet", "F11.csv"):
        output = tmp_path / f"{source}.out.parquet"
        with FakeWorker(url):
            program("generate", DATA / source, "-o", output)
        table = pq.read_table(output)
        loaded = datasets.Dataset.from_parquet(str(output), cache_dir=str(tmp_path / "cache"))
        assert loaded.column_names == table.schema.names
        assert loaded["completion"][:] == table["completion"].to_pylist() != []
        assert str(loaded.features["seed"].dtype) == "uint64"
