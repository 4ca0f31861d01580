"""The KV store: memory taken once, cut into blocks. Who owns which block is the engine's business.

    one tensor for keys and one for values a layer, each

        [num_blocks, kv_heads, block_size, stored_dim(head_dim)]        see engine/attention/kv_dtype.py
                                                                        and engine/attention/kv_layout.py

One head's block lies in one piece (4 KB for 16 tokens of 64 fp32 numbers): blocks in any order then read as
fast as contiguous memory, so paging costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention import ProbedLayer
from engine.attention.kv_dtype import stored_dim
from engine.limits import readable
from protocol import OptionRefused

CPU_KV_BYTES = 4 << 30
"""What a CPU's store takes by itself at most; `kv_memory` gives it more."""
CPU_SHARE = 0.5
"""Part of the free RAM the store may take: the rest is activations, text and the neighbours' page cache."""
CUDA_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token costs, over all layers."""

    layers: tuple[tuple[int, int, int], ...]
    """(kv_heads, key_dim, value_dim) of each."""
    dtype: torch.dtype
    block_size: int
    token_major: bool = False
    """See `engine.attention.kv_layout`."""

    @classmethod
    def of(
        cls, layers: list[ProbedLayer], dtype: torch.dtype, block_size: int, token_major: bool = False
    ) -> KVShape:
        """The shape that these attention modules write."""
        dims = tuple((a.kv_heads, a.key_dim, a.value_dim) for a in layers)
        return cls(dims, dtype, block_size, token_major)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers."""
        numbers = sum(
            heads * (stored_dim(key_dim, self.dtype) + stored_dim(value_dim, self.dtype))
            for heads, key_dim, value_dim in self.layers
        )
        return numbers * self.dtype.itemsize * self.block_size


class KVStore:
    """The blocks themselves. Untouched pages of a fresh CPU tensor cost nothing, so a large store starts small."""

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device, spare: int = 0) -> None:
        """Take the memory.

        Args:
            num_blocks: blocks to give out.
            spare: blocks behind them that are never given out.

        Raises:
            OptionRefused: the allocator refuses.
        """
        self.shape = shape
        self.num_blocks = num_blocks
        try:
            self.layers = [
                (
                    _blocks(shape, num_blocks + spare, heads, key_dim, device),
                    _blocks(shape, num_blocks + spare, heads, value_dim, device),
                )
                for heads, key_dim, value_dim in shape.layers
            ]
        except RuntimeError as error:  # torch.OutOfMemoryError is one; on CPU it is a plain RuntimeError
            raise OptionRefused(
                f"the KV store needs {readable(num_blocks * shape.block_bytes)} and the system refuses it: "
                "give less kv_memory, or fewer num_kv_blocks"
            ) from error

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in every layer, `(from, to)` each; none is read and written at once."""
        sources, targets = (list(blocks) for blocks in zip(*pairs, strict=True))
        for blocks in (part.view(torch.uint8) for pair in self.layers for part in pair):
            blocks[targets] = blocks[sources]


def _blocks(shape: KVShape, num_blocks: int, heads: int, dim: int, device: torch.device) -> torch.Tensor:
    width = stored_dim(dim, shape.dtype)
    if shape.token_major:
        tokens = torch.empty(num_blocks, shape.block_size, heads, width, dtype=shape.dtype, device=device)
        return tokens.transpose(1, 2)
    return torch.empty(num_blocks, heads, shape.block_size, width, dtype=shape.dtype, device=device)


def share_and_cap(device: torch.device) -> tuple[float, int | None]:
    """The part of the free memory a store takes by itself, and the bytes it then stops at."""
    return (CPU_SHARE, CPU_KV_BYTES) if device.type == "cpu" else (CUDA_SHARE, None)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken: of the card, or of RAM within the control group's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min(_available_ram(), _cgroup_room())


def _available_ram() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # not Linux: all there is


def _cgroup_room(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes left under the control group's limit (v2, then v1); without one, more than any machine has.

    Page cache that the kernel would drop counts as used in the group's own figure, so it is added back.
    """
    for folder, limit_file, used_file, cache_key in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = int((folder / limit_file).read_text())
            used = int((folder / used_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or the limit reads "max"
            continue
        return max(0, limit - used + int(stat.get(cache_key, 0)))
    return 1 << 62
