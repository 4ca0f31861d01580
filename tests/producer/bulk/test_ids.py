"""Names of rows: which are none, and which another row has too, however many rows there are."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.bulk import ids
from producer.bulk.ids import Unusable, bad_ids
from producer.bulk.inputs import find_inputs
from tests.producer.bulk.orders import write_rows


def found(path: Path, names: list[object]) -> list[tuple[int, str]]:
    source = write_rows(path, [{"prompt": "x", "name": name} for name in names])
    return [(bad.row.line, bad.message) for bad in bad_ids(find_inputs([str(source)]), "name")]


@given(st.lists(st.sampled_from(["a", "b", "c", "é", "", None, 7]), max_size=20), st.integers(1, 6))
def test_every_row_but_the_first_of_a_name_is_bad(
    tmp_path_factory: pytest.TempPathFactory, names: list[object], run: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids, "RUN", run)
        patch.setattr(ids, "_CHUNK", 8)
        bad = found(tmp_path_factory.mktemp("ids") / "in.jsonl", names)
    expected = []
    for line, name in enumerate(names, 1):
        if not isinstance(name, str) or not name:
            kind = {"": "empty", None: "null"}.get(name, "no text")  # type: ignore[arg-type]
            expected.append((line, f"name is {kind}"))
        elif name in names[: line - 1]:
            expected.append((line, f"name is that of line {names.index(name) + 1} too"))
    assert bad == expected


def test_names_that_share_their_hash_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "_key", lambda name: len(name))
    assert found(tmp_path / "in.jsonl", ["a", "b", "a", "cc"]) == [(3, "name is that of line 1 too")]


def test_rows_without_a_name_are_not_held(tmp_path: Path) -> None:
    ballast = "x" * 20_000
    rows = [{"prompt": ballast, "name": name} for name in (*range(100), *("a", "b") * 50)]
    inputs = find_inputs([str(write_rows(tmp_path / "in.jsonl", rows))])
    tracemalloc.start()
    unusable = Unusable(bad_ids(inputs, "name"))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 10 * len(ballast), "of 200 such rows"
    found = [fault for line in inputs.rows() if (fault := unusable.fault(line)) is not None]
    assert [fault.line for fault in found] == [*range(1, 101), *range(103, 201)]
    taken = {f"name is that of line {line} too" for line in (101, 102)}
    assert {fault.message for fault in found} == {"name is no text", *taken}
    assert {fault.columns["prompt"] for fault in found} == {ballast}
