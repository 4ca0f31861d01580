"""What a run can read: several files, packed ones, CSV, Parquet, standard input, URLs; cases F04, F10, F11, F12."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from producer.bulk.inputs import find_inputs
from producer.bulk.lines import BadRow, Line, Row, parse, position
from producer.bulk.requests import Requests
from producer.bulk.wording import Wording
from producer.refusal import Refused
from protocol import RequestError
from tests.producer.bulk.orders import read_rows, write_rows
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program

DATA = Path(__file__).parents[1] / "data"


def rows_of(*names: object) -> list[Line | BadRow]:
    return list(find_inputs(map(str, names)).rows())


def columns_of(*names: object) -> list[dict[str, object]]:
    return [json.loads(row.raw) for row in rows_of(*names) if isinstance(row, Line)]


# -- names of rows (F04) ---------------------------------------------------------------------------------------


def test_names_that_are_not_unique_refuse_a_batch_file(program: Program, url: str, tmp_path: Path) -> None:
    with FakeWorker(url) as worker:
        refused = program("generate", DATA / "F04.jsonl", "-o", tmp_path / "out.jsonl")
        assert refused.returncode == 2
        assert "line 3: custom_id is that of line 1 too" in refused.stderr
        for line, kind in [(4, "empty"), (6, "missing"), (7, "no text"), (8, "null")]:
            assert f"line {line}: custom_id is {kind}" in refused.stderr
        assert not (tmp_path / "out.jsonl").exists()
        assert worker.answered == []


def test_names_that_are_not_unique_are_errors_where_asked(program: Program, url: str, tmp_path: Path) -> None:
    with FakeWorker(url) as worker:
        done = program("generate", DATA / "F04.jsonl", "-o", tmp_path / "out.jsonl", "--bad-ids", "rows")
    assert done.returncode == 3
    answers, errors = read_rows(tmp_path / "out.jsonl"), read_rows(tmp_path / "out.errors.jsonl")
    assert [row["custom_id"] for row in answers] == ["u1", "u2", "x" * 600, "u1 ", "a/../b"]
    assert answers[0]["completion"] == "first"
    assert [(row["line"], row["error"]["code"]) for row in errors] == [
        (n, "invalid_id") for n in (3, 4, 6, 7, 8)
    ]
    assert len(worker.answered) == 5


def test_a_column_of_names_holds_for_any_rows(program: Program, url: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a", "key": "1"}, {"prompt": "b", "key": "1"}])
    with FakeWorker(url):
        refused = program("generate", source, "-o", tmp_path / "out.jsonl", "--id-column", "key")
        assert (refused.returncode, "line 2: key is that of line 1 too" in refused.stderr) == (2, True)
        assert program("generate", source, "-o", tmp_path / "out.jsonl").returncode == 0


# -- packed files (F10) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["F10.multi.jsonl.gz", "F10.multi.jsonl.zst", "F10.gz_named_plain.jsonl", "F10.plain_named_gz.jsonl.gz"],
)
def test_all_members_and_frames_are_read_whatever_the_name(name: str) -> None:
    inputs = find_inputs([str(DATA / name)])
    assert len(list(inputs.rows())) == inputs.count() == 6
    assert inputs.torn == []


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize("pack", [gzip.compress, _zstd])
def test_wherever_a_packed_file_ends_early_it_is_told(pack, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    lines = [json.dumps({"prompt": f"row {n} {math.sin(n)}"}).encode() + b"\n" for n in range(50)]
    packed = pack(b"".join(lines[:25])) + pack(b"".join(lines[25:]))
    whole = len(pack(b"".join(lines[:25])))
    path = tmp_path / "in.jsonl"
    for end in [*range(5, len(packed), 37), len(packed) - 1]:
        path.write_bytes(packed[:end])
        inputs = find_inputs([str(path)])
        rows = list(inputs.rows())
        assert (end == whole) == (inputs.torn == []), end
        good = [row.raw + b"\n" for row in rows if isinstance(row, Line)]
        assert good[: len(good) - 1] == lines[: max(len(good) - 1, 0)]
    path.write_bytes(packed)
    inputs = find_inputs([str(path)])
    assert ([row.raw + b"\n" for row in inputs.rows() if isinstance(row, Line)], inputs.torn) == (lines, [])


def test_of_a_torn_file_runs_what_could_be_read(program: Program, url: str, tmp_path: Path) -> None:
    command = ("generate", DATA / "F10.trunc.jsonl.gz", "-o", tmp_path / "out.jsonl")
    with FakeWorker(url):
        for _ in range(2):  # the second time all is done, and the input is no more whole than before
            done = program(*command)
            assert (done.returncode, "ends early" in done.stderr) == (4, True)
    assert (tmp_path / "out.jsonl").exists()
    checked = program("generate", DATA / "F10.trunc.jsonl.gz", "--check", "--json")
    assert (checked.returncode, len(json.loads(checked.stdout)["input_incomplete"])) == (4, 1)


def test_half_a_row_of_a_torn_table_is_an_error(tmp_path: Path) -> None:
    table = "id,prompt\n" + "".join(f"{n},prompt {math.sin(n)}\n" for n in range(200))
    path = tmp_path / "in.csv.gz"
    path.write_bytes(gzip.compress(table.encode())[:-900])
    inputs = find_inputs([str(path)])
    *whole, last = inputs.rows()
    assert [json.loads(row.raw) for row in whole if isinstance(row, Line)] == [
        dict(zip(("id", "prompt"), line.split(","), strict=True)) for line in table.splitlines()[1:]
    ][: len(whole)]
    assert isinstance(last, BadRow)
    assert (last.code, len(inputs.torn)) == ("input_incomplete", 1)


# -- tables (F11, F12) -----------------------------------------------------------------------------------------


def test_cells_of_csv_stay_text() -> None:
    with (DATA / "F11.csv").open(newline="", encoding="utf-8-sig") as file:
        expected = list(csv.DictReader(file))
    assert len(expected) == 9
    assert columns_of(DATA / "F11.csv") == expected


def test_rows_that_are_no_csv_are_errors_of_their_own() -> None:
    good, many, few, open_quote = rows_of(DATA / "F11.ragged.csv")
    assert isinstance(good, Line)
    assert json.loads(good.raw) == {"id": "1", "prompt": "ok"}
    found = [(row.line, row.code) for row in (many, few, open_quote) if isinstance(row, BadRow)]
    assert found == [(3, "invalid_csv"), (4, "invalid_csv"), (5, "invalid_csv")]


def test_csv_comes_back_as_it_was(program: Program, url: str, tmp_path: Path) -> None:
    with FakeWorker(url):
        done = program("generate", DATA / "F11.csv", "-o", tmp_path / "out.jsonl")
    assert done.returncode in (0, 3)  # the empty prompt of row 5 may be answered or refused
    expected = {str(row["id"]): row for row in columns_of(DATA / "F11.csv")}
    answers = {row["id"]: row for row in read_rows(tmp_path / "out.jsonl")}
    assert set(expected) - set(answers) <= {"5"}
    for key, row in answers.items():
        assert {name: row[name] for name in expected[key]} == expected[key]
        assert row["completion"] == expected[key]["prompt"]


def test_parameters_in_csv_are_read_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("prompt,max_tokens,stop,temperature\n7,7,1,\n8,many,,0.5\n")
    requests = Requests("run", {"temperature": 0.0}, None)
    good, bad = (parse(row) for row in rows_of(path) if isinstance(row, Line))
    assert isinstance(good, Row)
    assert isinstance(bad, Row)
    job = requests.asked(good).job
    assert (job.prompt, job.params.max_tokens, job.params.stop, job.params.temperature) == (
        "7",
        7,
        ("1",),
        0.0,
    )
    with pytest.raises(RequestError, match="max_tokens"):
        requests.asked(bad)


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


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n")
    (tmp_path / "none.parquet").write_bytes(b"PAR1 and nothing")
    for name, words in [("twice.csv", "twice"), ("none.parquet", "no Parquet")]:
        with pytest.raises(Refused, match=words):
            rows_of(tmp_path / name)


# -- several inputs --------------------------------------------------------------------------------------------


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


# -- questions made of columns ---------------------------------------------------------------------------------


def test_a_template_makes_the_prompt(program: Program, url: str, tmp_path: Path) -> None:
    rows = [{"text": "Guten Tag", "to": "English"}, {"text": "no language"}]
    source = write_rows(tmp_path / "in.jsonl", rows)
    template = tmp_path / "prompt.jinja"
    template.write_text("Into {{ to }}: {{ text }}\n")
    command = ("generate", source, "-o", tmp_path / "out.jsonl", "--prompt-template")
    with FakeWorker(url):
        assert program(*command, f"@{template}").returncode == 3
        other = program(*command, "{{ text }}")
        assert (other.returncode, "prompt_template" in other.stderr) == (2, True)
    assert read_rows(tmp_path / "out.jsonl")[0]["completion"] == "Into English: Guten Tag\n"
    assert "'to' is undefined" in read_rows(tmp_path / "out.errors.jsonl")[0]["error"]["message"]


def test_templates_are_sandboxed_and_bounded() -> None:
    for template in (
        "{{ row.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{% for _ in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    ):
        wording = Wording(prompt_template=template)
        wording.check()
        with pytest.raises(RequestError, match="template"):
            wording.question({"a": 1})
    with pytest.raises(Refused, match="line 1"):
        Wording(prompt_template="{{ a").check()


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


def test_a_null_prompt_names_its_column() -> None:
    with pytest.raises(RequestError, match="'text' is null"):
        Wording(prompt_column="text").question({"text": None})


def test_columns_become_a_chat() -> None:
    turns = [{"role": "user", "content": "hi"}]
    assert Wording(system="Be brief.", prompt_column="q").question({"q": "why?"})["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "why?"},
    ]
    assert Wording(system="s").question({"messages": turns})["messages"][0]["role"] == "system"
    assert Wording(system="s").question({"messages": [{"role": "system", "content": "own"}, *turns]})[
        "messages"
    ][0] == {
        "role": "system",
        "content": "own",
    }
    assert Wording(prompt_column="chat").question({"chat": turns})["messages"] == turns
    assert Wording(chat=True).question({"prompt": "hi"})["messages"] == turns
    with pytest.raises(RequestError, match="no column 'q'"):
        Wording(prompt_column="q").question({"prompt": "hi"})
    with pytest.raises(Refused):
        Wording(prompt_column="q", prompt_template="{{ q }}").check()


def test_check_estimates_what_there_is_to_do(program: Program, tmp_path: Path) -> None:
    rows = [{"prompt": "word " * 400, "max_tokens": 50}, {"prompt": [1, 2, 3], "max_tokens": 5, "n": 2}, {}]
    done = program("generate", write_rows(tmp_path / "in.jsonl", rows), "--check", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (
        3,
        {"rows": 3, "bad": 1, "prompt_tokens": 503, "most_output_tokens": 60, "input_incomplete": []},
    )
