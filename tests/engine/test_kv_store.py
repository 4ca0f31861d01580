"""How much KV is taken, and what is said when it is too little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import kv_store
from engine.kv_store import KVShape, KVStore, plan_num_blocks
from protocol import ModelUnavailable

SHAPE = KVShape(((3, 64, 64),) * 30, torch.float32, 32)
MIB = 1 << 20


def plan(**changes: Any) -> int:
    return plan_num_blocks(
        SHAPE,
        **{
            "max_model_len": 1024,
            "max_num_seqs": 128,
            "free": 1000 * MIB,
            "share": 0.5,
            "cap": None,
            **changes,
        },
    )


def test_a_block_of_smollm2_costs_what_its_heads_hold() -> None:
    assert SHAPE.block_bytes == 30 * 3 * (64 + 64) * 4 * 32


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 500 * MIB // SHAPE.block_bytes),
        ({"cap": 100 * MIB}, 100 * MIB // SHAPE.block_bytes),
        ({"cap": 1 * MIB}, 32),  # one sequence is more than the cap: it gets what it needs
        ({"kv_memory": 200 * MIB}, 200 * MIB // SHAPE.block_bytes),
        ({"num_kv_blocks": 40}, 40),
        ({"num_kv_blocks": 8}, 8),  # smaller than one sequence, but said so
        ({"max_num_seqs": 2}, 64),
        ({"max_num_seqs": 2, "num_kv_blocks": 400}, 64),
    ],
    ids=str,
)
def test_what_is_taken(given: dict[str, Any], expected: int) -> None:
    assert plan(**given) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"free": 80 * MIB}, ["1024 tokens", "45.0 MiB", "80.0 MiB", "--max-model-len", "--kv-memory"]),
        ({"kv_memory": 10 * MIB}, ["45.0 MiB", "--kv-memory is 10.0 MiB", "--max-model-len"]),
        ({"kv_memory": 2000 * MIB}, ["1000.0 MiB are free", "--kv-memory"]),
        ({"num_kv_blocks": 3000}, ["3000 blocks", "4.12 GiB", "--num-kv-blocks"]),
        ({"num_kv_blocks": 0}, ["--num-kv-blocks is 0"]),
        ({"kv_memory": 0}, ["--kv-memory is 0.0 MiB"]),
    ],
    ids=str,
)
def test_too_little_is_said_with_the_numbers_and_the_flags(given: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        plan(**given)
    for part in said:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


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
    with pytest.raises(ModelUnavailable, match=r"KV store needs .* GiB and the system refuses"):
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
