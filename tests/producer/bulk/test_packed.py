"""Packed inputs: every member and frame, whatever the name, and what of a torn one can be read; F10."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
import zstandard

from producer.bulk.inputs import find_inputs
from producer.bulk.lines import BadRow, Line
from tests.producer.fake_worker import FakeWorker
from tests.producer.program import Program

DATA = Path(__file__).parents[1] / "data"


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
