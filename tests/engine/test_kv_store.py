"""The KV store's memory, and how much of it there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import kv_store
from engine.kv_store import KVShape, KVStore
from protocol import OptionRefused

SHAPE = KVShape(((3, 64, 64),) * 30, torch.float32, 32)


def test_a_block_of_smollm2_costs_what_its_heads_hold() -> None:
    assert SHAPE.block_bytes == 30 * 3 * (64 + 64) * 4 * 32


def test_one_piece_of_memory_a_layer_and_kind() -> None:
    store = KVStore(KVShape(((2, 16, 8), (1, 16, 16)), torch.bfloat16, 4), 5, torch.device("cpu"))
    assert [(tuple(key.shape), tuple(value.shape)) for key, value in store.layers] == [
        ((5, 2, 4, 16), (5, 2, 4, 8)),
        ((5, 1, 4, 16), (5, 1, 4, 16)),
    ]
    assert all(
        part.is_contiguous() and part.dtype == torch.bfloat16 for pair in store.layers for part in pair
    )


def test_int8_counts_and_copies_its_scales() -> None:
    shape = KVShape(((2, 16, 8), (1, 6, 6)), torch.int8, 4)
    assert shape.block_bytes == 4 * (2 * (16 + 4) + 2 * (8 + 4) + 2 * (8 + 4))
    store = KVStore(shape, 3, torch.device("cpu"))
    assert sum(part[0].nbytes for pair in store.layers for part in pair) == shape.block_bytes
    for keys, values in store.layers:
        for part in (keys, values):
            part[:] = torch.arange(part.numel()).view_as(part).remainder(100).to(torch.int8)
    before = [part.clone() for pair in store.layers for part in pair]
    store.copy([(0, 2)])
    for old, new in zip(before, [part for pair in store.layers for part in pair], strict=True):
        assert torch.equal(new[2], old[0])
        assert torch.equal(new[:2], old[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_blocks_of_every_dtype_are_copied(dtype: torch.dtype) -> None:
    store = KVStore(KVShape(((2, 16, 8),), dtype, 4), 4, torch.device("cpu"))
    for part in store.layers[0]:
        part.copy_(torch.arange(4.0)[:, None, None, None])
    store.copy([(1, 0), (2, 3)])
    for part in store.layers[0]:
        assert part.float()[:, 0, 0, 0].tolist() == [1, 1, 2, 2]


def test_what_the_system_refuses_is_one_line() -> None:
    with pytest.raises(OptionRefused, match=r"KV store needs .* GiB and the system refuses"):
        KVStore(SHAPE, 1 << 45, torch.device("cpu"))


@pytest.mark.parametrize(
    ("files", "room"),
    [
        (
            {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 600\ninactive_file 100\n"},
            400,
        ),
        ({"memory.max": "1000", "memory.current": "1000", "memory.stat": "inactive_file 0\n"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "500",
                "memory/memory.usage_in_bytes": "200",
                "memory/memory.stat": "total_inactive_file 50\n",
            },
            350,
        ),
    ],
    ids=["v2", "v2-full", "v1"],
)
def test_a_control_group_s_limit_counts(tmp_path: Path, files: dict[str, str], room: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert kv_store._cgroup_room(tmp_path) == room


def test_without_a_limit_ram_decides(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert kv_store._cgroup_room(tmp_path) > 1 << 60
    assert 0 < kv_store.free_memory(torch.device("cpu")) < 1 << 60
