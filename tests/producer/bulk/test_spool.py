"""The spool: what was appended is there after any crash, and what was torn is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.bulk.records import Record
from producer.bulk.spool import Spool
from protocol import MillstreamError


def record(line: int, text: str = "x", *, answered: bool = True) -> Record:
    return Record(line, f"{line:016x}", answered, b'{"text": "' + text.encode() + b'"}')


def test_records_come_back_by_line_the_last_one_counts(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool") as spool:
        spool.append([record(5), record(2, answered=False)])
        spool.append([record(9), record(5, "again")])
    with Spool(tmp_path / "spool") as spool:
        assert list(spool.records()) == [record(2, answered=False), record(5, "again"), record(9)]
        assert spool.record(5) == record(5, "again")
        assert spool.holds(5, record(5).digest) is True
        assert spool.holds(2, record(2).digest) is False
        assert spool.holds(2, "0" * 16) is None
        assert spool.holds(3, record(3).digest) is None
        assert spool.holds(900, record(3).digest) is None


def test_lines_the_input_lost_are_forgotten(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool") as spool:
        spool.append([record(number) for number in range(1, 11)])
        spool.drop(3, 5)
        spool.drop(9)
        assert [one.line for one in spool.records()] == [1, 2, 5, 6, 7, 8]


@given(st.data())
def test_any_torn_tail_is_cut_off(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("torn") / "spool"
    whole = [record(number, "é" * number) for number in range(1, 6)]
    with Spool(path) as spool:
        spool.append(whole)
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    tail = data.draw(st.sampled_from([b"", b"\0" * 50, b"\0" * 50 + b"\n", b"7 00"]))
    path.write_bytes(content[:cut] + tail)
    kept = content[:cut].count(b"\n")
    with Spool(path) as spool:
        assert list(spool.records()) == whole[:kept]
        spool.append([record(8)])
    with Spool(path) as spool:
        assert list(spool.records()) == [*whole[:kept], record(8)]


def test_a_full_disk_leaves_the_spool_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, room = os.pwrite, [30]

    def short(file: int, data: memoryview, at: int) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken = min(room[0], len(data))
        room[0] -= taken
        return real(file, data[:taken], at)

    with Spool(tmp_path / "spool") as spool:
        spool.append([record(1)])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", short)
            with pytest.raises(MillstreamError, match="No space left"):
                spool.append([record(2), record(3)])
        assert spool.holds(2, record(2).digest) is None
        spool.append([record(4)])
    with Spool(tmp_path / "spool") as spool:
        assert list(spool.records()) == [record(1), record(4)]
