"""Parquet files that grow: the bytes are those of a file that was written in one go."""

from __future__ import annotations

import errno
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from producer.batch.growing import Growing
from producer.batch.growing_table import Piece, complete, footer

SCHEMA = pa.schema(
    [
        ("number", "uint64"),
        ("text", "string"),
        ("kind", pa.dictionary("int32", "string")),
        ("nested", pa.list_(pa.struct([("x", "float64")]))),
    ],
    metadata={"kept": "yes"},
)


def group(number: int) -> pa.Table:
    """A row group with a value of each kind, and none."""
    columns = [
        [number, 2**64 - 1, None],
        [f"text {number}" * 100, "", None],
        [f"kind {number % 2}", None, "b"],
        [[{"x": 0.5}, {"x": None}], [], None],
    ]
    return pa.Table.from_arrays(
        [pa.array(*pair) for pair in zip(columns, SCHEMA.types, strict=True)], schema=SCHEMA
    )


@pytest.mark.parametrize("cuts", [[], [0], [0, 0], [3], [1, 2, 3], [2, 2, 5], [6]])
def test_wherever_it_is_cut_the_file_is_that_of_one_go(cuts: list[int], tmp_path: Path) -> None:
    with pq.ParquetWriter(tmp_path / "whole", SCHEMA) as writer:
        for number in range(6):
            writer.write_table(group(number))
    path, end = tmp_path / "grown", 0
    bounds = [0, *cuts, 6]
    for piece_number, (first, last) in enumerate(pairwise(bounds)):
        with path.open("ab") as torn:
            torn.write(b"of a process that was killed")
        with Piece(path, piece_number, SCHEMA, end) as piece:
            for number in range(first, last):
                piece.write(group(number))
            end = piece.end()
        assert path.stat().st_size == end
    for _ in range(2):
        complete(path, len(bounds) - 1, end)
        assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    assert pq.read_table(path).equals(pa.concat_tables(map(group, range(6))))


@pytest.mark.parametrize("written", [0, 1, 5, 20])
def test_what_a_piece_wrote_before_the_disk_was_full_does_not_count(
    written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "grown"
    with Piece(path, 0, SCHEMA, 0) as piece:
        piece.write(group(0))
        end = piece.end()
    left = [written]

    def write(file: Growing, data: bytes | memoryview) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, "full")
        left[0] -= 1
        append(file, data)

    append = Growing.write
    with monkeypatch.context() as patch:
        patch.setattr(Growing, "write", write)
        with pytest.raises(OSError, match="full") as fault:
            go_on(path, end)
    assert fault.value.errno == errno.ENOSPC
    assert not footer(path, 1).exists()
    complete(path, 1, end)
    assert pq.read_table(path).equals(group(0))


def go_on(path: Path, end: int) -> None:
    """Write a second piece."""
    with Piece(path, 1, SCHEMA, end) as piece:
        for number in range(10):
            piece.write(group(number))
        piece.end()
