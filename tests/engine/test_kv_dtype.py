"""Keys and values kept in another dtype than the model's: right, and the same in every arrangement."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

from engine.attention import Backend, LayerCall, ReferenceBackend, pack
from engine.attention.eight import load, put
from engine.attention.kv_dtype import (
    KV_DTYPES,
    choose_kv_dtype,
    from_stored,
    stored_dim,
    to_stored,
)
from engine.attention.numba_cpu import NumbaBackend
from engine.attention.numba_numbers import bits, scales, store
from engine.interface import Chunk
from engine.loading import load_runner
from protocol import OptionRefused
from tests.engine.doubles import optimistic, request
from tests.engine.test_equal_generate import TINY, drive, engine_for

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS, KV_HEADS, DIM = 4, 2, 16
LENGTH, BLOCK = 43, 8
# The kernel is compiled for each dtype by itself, which takes 10 to 20 s.
BACKENDS = [ReferenceBackend, pytest.param(NumbaBackend, marks=pytest.mark.long)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def as_stored(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The vectors `[..., D]` as they come back from a store of `dtype`."""
    return from_stored(to_stored(vectors, dtype), vectors.shape[-1], vectors.dtype)


# One vector


@pytest.mark.parametrize("name", KV_DTYPES)
@pytest.mark.parametrize("dim", [16, 6])
def test_a_vector_comes_back_as_near_as_its_dtype_allows(name: str, dim: int) -> None:
    dtype = KV_DTYPES[name]
    vectors = random(5, 3, dim) * torch.logspace(-3, 3, 5)[:, None, None]
    stored = to_stored(vectors, dtype)
    assert stored.dtype == dtype
    assert stored.shape == (5, 3, stored_dim(dim, dtype))
    back = from_stored(stored, dim, torch.float32)
    error = (back - vectors.clamp(-448, 448) if name == "fp8" else back - vectors).abs()
    # Half a unit: of the scale for int8, of the last bit of the mantissa (or of the smallest number) for the others.
    unit = (
        vectors.abs().amax(-1, keepdim=True) / 127
        if name == "int8"
        else vectors.abs() * torch.finfo(dtype).eps
    )
    smallest = 0 if name == "int8" else torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert (error <= 0.5001 * unit + smallest).all()
    assert torch.equal(as_stored(vectors, dtype), back)
    torch.testing.assert_close(as_stored(back, dtype), back, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", KV_DTYPES)
def test_zeros_stay_and_what_is_no_number_is_seen(name: str) -> None:
    dtype = KV_DTYPES[name]
    assert torch.equal(as_stored(torch.zeros(2, DIM), dtype), torch.zeros(2, DIM))
    broken = random(2, DIM)
    broken[0, 3] = math.nan
    assert torch.isnan(as_stored(broken, dtype)[0]).any()
    assert not torch.isnan(as_stored(broken, dtype)[1]).any()


def numbers_of_all_sizes() -> torch.Tensor:
    """`[N, 16]` float32: every exponent, ties between neighbours of each small dtype, both signs, NaN, zeros."""
    generator = torch.Generator().manual_seed(0)
    around = torch.randint(0x30000000, 0x48000000, (4000,), generator=generator, dtype=torch.int32)
    ties = torch.arange(0x33000000, 0x47800000, 0x1000 * 37, dtype=torch.int32)  # half a unit of float16
    small = torch.arange(0x3A000000, 0x43F00000, 0x80000, dtype=torch.int32)  # halves of fp8's units
    positive = torch.cat([around, ties, small]).view(torch.float32)
    special = torch.tensor([0.0, -0.0, 448, 449, 464, 480, 65504, 65519, 65520, 1e30, 1e-30, 2**-10])
    found = torch.cat([positive, -positive, special])
    found = torch.cat([found, torch.zeros(-len(found) % DIM)]).view(-1, DIM)
    found[-1, -1] = math.nan
    return found


@numba.njit(cache=True)
def written(blocks: Any, scales: Any, vectors: Any) -> None:
    for row in range(vectors.shape[0]):
        store(blocks, scales, (row, 0, 0), vectors[row])


@numba.njit(cache=True)
def read(stored: Any, out: Any) -> None:
    for index in range(0, stored.shape[0], 8):
        put(out, index, load(stored, index))


@pytest.mark.parametrize("name", KV_DTYPES)
def test_the_kernel_writes_the_bits_that_torch_writes(name: str) -> None:
    dtype, vectors = KV_DTYPES[name], numbers_of_all_sizes()
    expected = to_stored(vectors, dtype)[:, None, None]
    blocks = torch.zeros_like(expected)
    written(bits(blocks), scales(blocks), vectors.numpy())
    fine = ~torch.isnan(from_stored(expected, DIM, torch.float32))
    assert (~fine).sum() == (DIM if name == "int8" else 1)
    assert torch.isnan(from_stored(blocks, DIM, torch.float32)[~fine]).all()
    whole = fine.all(-1)
    assert torch.equal(blocks[whole].view(torch.uint8), expected[whole].view(torch.uint8))


@pytest.mark.parametrize("name", ["float16", "fp8", "bfloat16"])
def test_the_kernel_reads_every_pattern_as_torch_does(name: str) -> None:
    dtype = KV_DTYPES[name]
    patterns = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32)
    stored = patterns.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)
    out = np.empty(len(patterns), np.float32)
    read(bits(stored), out)
    expected = stored.float()
    if name == "float16":  # an infinite one is never written
        expected[torch.isinf(expected)] = math.nan
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=0, atol=0, equal_nan=True)


# One sequence, in chunks


class Sequence:
    """A sequence of random queries, keys and values, and blocks to keep it in."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.query = random(LENGTH, HEADS, DIM, seed=1)
        self.key, self.value = (random(LENGTH, KV_HEADS, DIM, seed=seed) for seed in (2, 3))
        width = -(-LENGTH // BLOCK)
        nan = torch.full((width, KV_HEADS, BLOCK, DIM), math.nan)
        self.blocks = [to_stored(nan, dtype).clone() for _ in range(2)]
        self.table = list(range(width))[::-1]

    def run(self, backend: Backend, cuts: list[int], **features: Any) -> torch.Tensor:
        """Attention of all rows, computed in the chunks that `cuts` makes; `[LENGTH, H, D]`."""
        out = []
        for start, end in pairwise([0, *cuts, LENGTH]):
            rows = slice(start, end)
            chunk = Chunk([0] * (end - start), start, self.table, num_logits=1)
            backend.plan(pack([chunk], BLOCK, torch.device("cpu")))
            given: dict[str, Any] = {"sliding_window": None, "softcap": None, "sinks": None, **features}
            call = LayerCall(self.query[rows], self.key[rows], self.value[rows], *self.blocks, 0.3, **given)
            out.append(backend.attend(call))
        return torch.cat(out)


def exact(sequence: Sequence, dtype: torch.dtype, window: int | None) -> torch.Tensor:
    """In float64, over what is stored."""
    key, value = (as_stored(part, dtype).double() for part in (sequence.key, sequence.value))
    position = torch.arange(LENGTH)
    unseen = position[None] > position[:, None]
    if window is not None:
        unseen |= position[None] <= position[:, None] - window
    out = []
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = sequence.query[:, head].double() @ key[:, kv_head].T * 0.3
        out.append(scores.masked_fill(unseen, -math.inf).softmax(-1) @ value[:, kv_head])
    return torch.stack(out, 1)


@pytest.fixture(params=KV_DTYPES)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    return KV_DTYPES[request.param]


CUTS = {"at once": [], "in chunks": [5, 6, 24, 40], "one by one": list(range(1, LENGTH))}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("window", [None, 9])
def test_rows_attend_to_what_is_stored_whatever_the_chunks(
    backend: type[Backend], cuts: str, window: int | None, dtype: torch.dtype
) -> None:
    sequence = Sequence(dtype)
    got = sequence.run(backend(), CUTS[cuts], sliding_window=window)
    torch.testing.assert_close(got.double(), exact(sequence, dtype, window), atol=2e-6, rtol=1e-5)
    for blocks, vectors in zip(sequence.blocks, (sequence.key, sequence.value), strict=True):
        for position in range(LENGTH):
            found = blocks[sequence.table[position // BLOCK], :, position % BLOCK]
            assert torch.equal(found.view(torch.uint8), to_stored(vectors[position], dtype).view(torch.uint8))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_rare_features_too(kv_dtype: str) -> None:
    found = [
        Sequence(KV_DTYPES[kv_dtype]).run(
            NumbaBackend(), cuts, softcap=0.8, sinks=torch.linspace(-1, 2, HEADS)
        )
        for cuts in CUTS.values()
    ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=2e-6, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["int8", "float32"])
def test_a_model_in_bfloat16(name: str) -> None:
    """Query, keys and values of two bytes, blocks of another dtype."""
    sequence = Sequence(KV_DTYPES[name])
    for part in ("query", "key", "value"):
        setattr(sequence, part, getattr(sequence, part).to(torch.bfloat16))
    one_by_one = sequence.run(NumbaBackend(), CUTS["one by one"])
    assert one_by_one.dtype == torch.bfloat16
    torch.testing.assert_close(
        one_by_one.double(), exact(sequence, KV_DTYPES[name], None), atol=1e-2, rtol=1e-2
    )


# A model

ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "roomy": {"block_size": 32},
    "chunks of 7": {"block_size": 8, "max_num_batched_tokens": 7},
    "preempted": {"block_size": 8, "num_kv_blocks": 20},
}


@pytest.mark.long
def test_a_model_s_answers_do_not_depend_on_chunks_and_preemptions(
    tiny_model_dir: Path, dtype: torch.dtype
) -> None:
    name = next(name for name, known in KV_DTYPES.items() if known == dtype)
    answers = []
    for arrangement, options in ARRANGEMENTS.items():
        engine = optimistic(engine_for(tiny_model_dir, kv_dtype=name, **options))
        answers.append(
            drive(engine, [request(f"{i}", row["prompt_ids"], 24) for i, row in enumerate(TINY[:8])])
        )
        assert (engine.stats().preemptions > 0) == (arrangement == "preempted")
    assert answers[0] == answers[1] == answers[2]
    if dtype.itemsize == 1:
        in_full = {f"{i}": row["greedy_40"][:24] for i, row in enumerate(TINY[:8])}
        assert answers[0] != in_full, "nothing was rounded"


ON_CPU: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "max_num_seqs": 2}


@pytest.mark.parametrize(
    ("asked", "recorded", "block_bytes"),
    [("auto", "", 16 * 4), ("float32", "", 16 * 4), ("int8", "int8", 16 + 4)],
)
def test_a_queue_s_workers_must_agree_on_it(
    tiny_model_dir: Path, asked: str, recorded: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loading.choose_backend", lambda *_: ReferenceBackend())
    loaded = load_runner(str(tiny_model_dir), kv_dtype=asked, kv_memory=1 << 20, block_size=4, **ON_CPU)
    assert loaded.weights.fingerprint.kv_dtype == recorded
    # 4 layers, keys and values of 2 heads, 4 tokens a block; as many blocks as two sequences of 64 tokens fill.
    assert loaded.runner.num_kv_blocks == min(32, (1 << 20) // (4 * 2 * 2 * 4 * block_bytes))


class Paged(ReferenceBackend):
    name = "paged"

    def kv_dtypes(self, compute: torch.dtype) -> tuple[torch.dtype, ...]:
        return compute, torch.int8


def test_what_a_backend_cannot_keep_is_refused_with_the_nearest_that_works() -> None:
    assert choose_kv_dtype(None, torch.bfloat16, Paged()) == torch.bfloat16
    assert choose_kv_dtype(torch.int8, torch.bfloat16, Paged()) == torch.int8
    for asked, nearest in [("fp8", "int8"), ("float16", "bfloat16"), ("float32", "bfloat16")]:
        with pytest.raises(OptionRefused) as caught:
            choose_kv_dtype(KV_DTYPES[asked], torch.bfloat16, Paged())
        assert str(caught.value) == (
            f"kv_dtype {asked} cannot be kept beside a model in bfloat16 by attention backend 'paged' "
            f"(it can: bfloat16, int8): give kv_dtype {nearest}"
        )
