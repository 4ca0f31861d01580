"""What a run reads: several files, standard input, URLs, as one sequence of rows; F10, F11, F12."""

from __future__ import annotations

import gzip
import io
import shutil
import sys
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from producer.bulk.inputs import find_inputs
from producer.bulk.lines import position
from producer.refusal import Refused
from tests.producer.bulk.orders import read_rows, write_rows
from tests.producer.bulk.reading import rows_of
from tests.producer.bulk.test_full_disk import most_bytes_of_a_file
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program


def test_several_inputs_are_one_run(program: Program, url: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "a1.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    (tmp_path / "a2.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "three"}\n\n{"prompt": 4.5}\n'))
    (tmp_path / "b.csv").write_text("prompt\nfive\n")
    command = ("generate", tmp_path / "a*", tmp_path / "b.csv", "-o", tmp_path / "out.jsonl")
    with FakeWorker(url) as worker:
        done = program(*command)
        assert done.returncode == 3
        assert [row["completion"] for row in read_rows(tmp_path / "out.jsonl")] == [
            "one",
            "two",
            "three",
            "five",
        ]
        (error,) = read_rows(tmp_path / "out.errors.jsonl")
        assert (Path(error["file"]).name, error["line"]) == ("a2.jsonl.gz", 3)
        assert "a2.jsonl.gz, line 3" in done.stderr

        with (tmp_path / "a1.jsonl").open(
            "a"
        ) as file:  # a row more in the first leaves the others' places alone
            file.write('{"prompt": "new"}\n')
        assert program(*command).returncode == 3
        assert len(worker.answered) == 5
    assert [row["completion"] for row in read_rows(tmp_path / "out.jsonl")] == [
        "one",
        "two",
        "new",
        "three",
        "five",
    ]


def test_from_any_row_on_the_rest_is_the_same(tmp_path: Path) -> None:
    lines = b'\xef\xbb\xbf{"prompt": 1}\r\n\n{"a"\n  {"b": "\xe2\x80\xa8"}\n\n7'
    table = b'a,b\n1,"x\ny"\n\n"z" 3,4\n1,2,3\n\xff,1\n9,'
    (tmp_path / "1.jsonl").write_bytes(lines)
    (tmp_path / "2.jsonl.gz").write_bytes(gzip.compress(lines)[:-9])
    (tmp_path / "3.csv").write_bytes(table)
    (tmp_path / "4.csv.zst").write_bytes(zstandard.compress(table)[:-1])
    pq.write_table(pa.table({"n": range(1100)}), tmp_path / "5.parquet", row_group_size=600)
    (tmp_path / "6.jsonl").write_bytes(b"")
    inputs = find_inputs([str(tmp_path / "*.*")])
    rows = list(inputs.rows())
    torn = list(inputs.torn)
    assert len(torn) == 2
    for place in [*range(25), 500, 511, 512, 600, 601, 1099, 1100, len(rows) - 2, len(rows) - 1]:
        assert list(inputs.rows(rows[place].number)) == rows[place + 1 :], place
        assert inputs.torn == torn[len(torn) - len(inputs.torn) :]


def test_positions_do_not_meet() -> None:
    assert position(0, 7) == 7
    assert len({position(file, line) for file in range(50) for line in range(1, 50)}) == 50 * 49


def test_standard_input_is_read_once_and_resumed(program: Program, url: str, tmp_path: Path) -> None:
    rows = '{"prompt": "a"}\n{"prompt": "b"}\n'
    command = ("generate", "-", "-o", tmp_path / "out.jsonl")
    with FakeWorker(url) as worker:
        assert program(*command, stdin=rows).returncode == 0
        assert program(*command, stdin=rows).returncode == 0
        assert len(worker.answered) == 2
        assert not list((tmp_path / "out.jsonl.run").glob("input-*"))
        assert program(*command, stdin=rows + '{"prompt": "c"}\n').returncode == 0
        assert len(worker.answered) == 3
    assert [row["completion"] for row in read_rows(tmp_path / "out.jsonl")] == ["a", "b", "c"]
    assert not list((tmp_path / "out.jsonl.run").glob("input-*"))


def test_a_url_is_read(program: Program, url: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "by url"}])
    with FakeWorker(url):
        done = program("generate", f"file://{source}", "-o", tmp_path / "out.jsonl")
        assert done.returncode == 0
        missing = program("generate", f"file://{tmp_path}/none.jsonl", "-o", tmp_path / "out2.jsonl")
        assert (missing.returncode, "cannot read file://" in missing.stderr) == (2, True)
    assert read_rows(tmp_path / "out.jsonl")[0]["completion"] == "by url"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (RuntimeError("403, message='Forbidden'\nand more"), "403, message='Forbidden'"),
        (TimeoutError(), "TimeoutError"),
        (FileNotFoundError("memory://rows"), "it is not there"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (LookupError("\n \n"), "LookupError"),
        (ImportError("Install s3fs to access S3"), "Install s3fs to access S3"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "late", [pytest.param(False, marks=pytest.mark.long), True], ids=["opening", "reading"]
)
def test_whatever_goes_wrong_at_the_other_end_of_a_url_is_said_in_a_line(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, says: str, late: bool
) -> None:
    class Source(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise fault

    def opened(*_: object) -> Source:
        if not late:
            raise fault
        return Source()

    monkeypatch.setattr(fsspec, "open", opened)
    done = program("generate", "memory://rows", "-o", tmp_path / "out.jsonl")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"cannot read memory://rows: {says}" in done.stderr


def test_a_disk_too_full_for_the_copy_of_a_url_is_said_of_the_copy(program: Program, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}] * 1000)
    with most_bytes_of_a_file(3000):
        done = program("generate", f"file://{source}", "-o", tmp_path / "out.jsonl")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert f"File too large: {tmp_path}/out.jsonl.run/input-0" in done.stderr


@pytest.mark.parametrize(
    "options", [(), ("--check",), ("--id-column", "prompt")], ids=["run", "check", "names"]
)
@pytest.mark.parametrize(
    ("source", "output", "package"),
    [
        ("rows.parquet", "out.jsonl", "pyarrow"),
        ("rows.jsonl", "out.parquet", "pyarrow"),
        ("rows.jsonl.zst", "out.jsonl", "zstandard"),
        ("memory://rows.jsonl", "out.jsonl", "fsspec"),
    ],
)
def test_a_package_that_is_missing_is_named(
    program: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    output: str,
    package: str,
    options: tuple[str, ...],
) -> None:
    """As after an install without `[files]`; a check writes no output, so it asks for nothing that writing needs."""
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "rows.jsonl.zst").write_bytes(zstandard.compress(b'{"prompt": "a"}\n'))
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    done = program(
        "generate", source if "://" in source else tmp_path / source, "-o", tmp_path / output, *options
    )
    if "--check" in options and output == "out.parquet":
        assert done.returncode == 0, done.stderr
    else:
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "pip install 'millstream[files]'" in done.stderr


def test_inputs_that_are_not_there_or_named_twice(program: Program, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    shutil.copy(source, tmp_path / "zip.jsonl")
    for names, words in [
        ((source, source), "named twice"),
        (("-", "-"), "named twice"),
        ((tmp_path / "*.none",), "no file matches"),
        ((source, tmp_path / "none.jsonl"), "No such file"),
    ]:
        refused = program("generate", *names, "-o", tmp_path / "out.jsonl")
        assert (refused.returncode, words in refused.stderr) == (2, True), refused


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n")
    (tmp_path / "none.parquet").write_bytes(b"PAR1 and nothing")
    for name, words in [("twice.csv", "twice"), ("none.parquet", "not a Parquet file")]:
        with pytest.raises(Refused, match=words):
            rows_of(tmp_path / name)


@pytest.mark.parametrize("name", ["in.csv", "in.csv.gz", "in.parquet"])
@pytest.mark.parametrize("flag", ["--prompt-column", "--id-column"])
def test_a_column_that_a_table_lacks_is_refused_before_anything_runs(
    program: Program, tmp_path: Path, name: str, flag: str
) -> None:
    """Else each row would be an error, and the mended command another question."""
    source, output = tmp_path / name, tmp_path / "out.jsonl"
    table = b"prompt;answer\na;b\n" if "csv" in name else b""
    source.write_bytes(gzip.compress(table) if name.endswith("gz") else table)
    if name.endswith("parquet"):
        pq.write_table(pa.table({"prompt;answer": ["a"]}), source)
    for verb in (
        ("generate", source, "-o", output),
        ("generate", source, "--check"),
        ("batch", "submit", source),
    ):
        done = program(*verb, flag, "text")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert f"has no column 'text' ({flag}); its columns: prompt;answer" in done.stderr
    assert not output.exists()
