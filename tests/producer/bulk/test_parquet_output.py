"""Output as Parquet: the input's columns with their types, and a fixed schema beside them; F11 and F12."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from producer.bulk import parquet_output
from producer.bulk.inputs import Input, Inputs
from producer.bulk.parquet_output import write_answers, write_errors
from producer.bulk.records import Record
from protocol import MillstreamError
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
        assert [(row["line"], row["error_code"], row["whole"]) for row in errors] == [
            (3, "invalid_request", 3)
        ]

        assert program(*command).returncode == 3  # done before, as it ended then
        write_rows(source, [*rows[:2], {"prompt": "c"}])
        assert program(*command).returncode == 0
        assert len(worker.answered) == 3
    assert pq.read_table(tmp_path / "out.parquet")["completion"].to_pylist() == ["a", "b", "c"]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([2**53 + 1, -(2**53) - 1, 2**63, 2**70 + 1, 0.5, 1e300, "", "a", "1"]),
    lambda below: st.lists(below, max_size=2) | st.dictionaries(st.sampled_from("ab"), below, max_size=2),
    max_leaves=4,
)
LINES = Inputs([Input("in.jsonl", None, "jsonl")])


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.sampled_from("xy"), VALUES), min_size=1, max_size=4))
@example([{"x": {}}, {"x": {}}])
@example([{"x": [{"a": {}}]}, {"x": [{"a": {"b": 1}}]}])
@example([{"x": [{"a": {}, "b": {}}]}, {"x": [{"a": {"b": 1}}]}])
@example([{"x": 2**53 + 1}, {"x": 0.5}])
@example([{"x": {"a": [0.5]}}, {"x": {"a": [-(2**53) - 1]}}, {"y": 1}])
@example([{"x": [0.5, False]}])
@example([{"x": {"a": [0.5]}}, {"x": {"a": [True]}}])
def test_whatever_rows_hold_comes_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    assert_it_comes_back(tmp_path_factory.mktemp("rows") / "out.parquet", rows, at_once=1)
    assert_it_comes_back(tmp_path_factory.mktemp("rows") / "out.parquet", rows, at_once=4)


def test_a_truth_value_is_no_number(tmp_path: Path) -> None:
    """Arrow takes it for 1.0 behind a fraction, and in no other place."""
    for number, values in enumerate(permutations([0.5, False, 1])):
        path = tmp_path / f"{number}.parquet"
        write_answers(path, lambda rows=values: map(answered, [{"x": value} for value in rows]), LINES)
        assert pq.read_table(path)["x"].to_pylist() == [json.dumps(value) for value in values]


def assert_it_comes_back(path: Path, rows: list[Any], at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_output, "AT_ONCE", at_once)
        write_answers(path, lambda: map(answered, rows), LINES)
    read = pq.read_table(path).to_pylist()
    for row, back in zip(rows, read, strict=True):
        for name in "xy":
            assert is_said(back.get(name), row.get(name)), (row, back)


def answered(row: dict[str, Any]) -> Record:
    return Record(1, "0" * 16, True, json.dumps({**row, "completion": "c"}).encode())


def is_said(cell: Any, value: Any) -> bool:
    """Whether a cell says a value: as it is, or as JSON; of an object members may be null that it does not have."""
    return says(cell, value) or (isinstance(cell, str) and says(json.loads(cell), value))


def says(cell: Any, value: Any) -> bool:
    if isinstance(cell, dict) and isinstance(value, dict):
        return set(value) <= set(cell) and all(says(cell[name], value.get(name)) for name in cell)
    if isinstance(cell, list) and isinstance(value, list):
        return len(cell) == len(value) and all(map(says, cell, value))
    return bool(cell == value) and isinstance(cell, bool) == isinstance(value, bool)


def test_a_row_keeps_what_it_calls_code_and_message(tmp_path: Path) -> None:
    row = {"line": 7, "custom_id": None, "error": {"code": "invalid_request", "message": "no"}}
    row |= {"code": "print()", "message": ["hi"]}
    record = Record(7, "0" * 16, False, json.dumps(row).encode())
    write_errors(tmp_path / "out.parquet", lambda: iter([record]), LINES)
    (read,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert read["error_code"] == "invalid_request"
    assert read["error_message"] == "no"
    assert (read["code"], read["message"]) == ("print()", ["hi"])


@pytest.mark.parametrize("seed", [-1, 2**64, 0.5, "x", [1]])
def test_an_answer_of_another_program_that_no_fixed_column_holds_is_said_so(
    tmp_path: Path, seed: object
) -> None:
    record = Record(1, "0" * 16, True, json.dumps({"completion": "c", "seed": seed}).encode())
    with pytest.raises(MillstreamError, match="seed is not of type uint64"):
        write_answers(tmp_path / "out.parquet", lambda: iter([record]), LINES)


def test_what_arrow_cannot_write_is_said_in_a_line(
    program: Program, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise pa.ArrowNotImplementedError("no such\nthing")

    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    command = ("generate", source, "-o", tmp_path / "out.parquet")
    with FakeWorker(url) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(pq.ParquetWriter, "write_table", write)
            done = program(*command)
        assert done.returncode == 1
        assert (
            "cannot be written as Parquet: no such. What is answered is kept" in done.stderr.splitlines()[-1]
        )
        assert "Traceback" not in done.stderr
        assert program(*command, "--format", "jsonl").returncode == 0
        assert len(worker.answered) == 1


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
    import datasets  # takes seconds

    for source in ("F12.parquet", "F11.csv"):
        output = tmp_path / f"{source}.out.parquet"
        with FakeWorker(url):
            program("generate", DATA / source, "-o", output)
        table = pq.read_table(output)
        loaded = datasets.Dataset.from_parquet(str(output), cache_dir=str(tmp_path / "cache"))
        assert loaded.column_names == table.schema.names
        assert loaded["completion"][:] == table["completion"].to_pylist() != []
        assert str(loaded.features["seed"].dtype) == "uint64"
