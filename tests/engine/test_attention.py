"""Backends against attention written out over whole sequences."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from engine.attention import Backend, LayerCall, PackedBatch, ReferenceBackend, choose_backend, pack
from engine.attention.numba_cpu import NumbaBackend
from engine.attention.pieces import END, FIRST, PIECE_TOKENS, ROW, ROWS, SLOT, TILE_ROWS, cut
from engine.interface import Chunk

HEADS, KV_HEADS, DIM = 4, 2, 16
LONG = PIECE_TOKENS + 40
BACKENDS: list[type[Backend]] = [ReferenceBackend, NumbaBackend]
# Tokens of each sequence, and how many of the last ones this step computes; some end at block borders.
MIXED = [(1, 1), (17, 1), (9, 9), (33, 5), (32, 1), (40, 23), (5, 2)]
DECODES = [(1, 1), (17, 1), (33, 1), (32, 1), (100, 1)]


@dataclass
class Case:
    """A step over sequences whose keys and values are known in full."""

    batch: PackedBatch
    call: LayerCall
    keys: list[torch.Tensor]
    """`[length, N, D]` of each sequence."""
    values: list[torch.Tensor]


def make_case(
    sizes: list[tuple[int, int]],
    block_size: int,
    dtype: torch.dtype,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    dim: int = DIM,
) -> Case:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    widths = [-(-length // block_size) for length, _ in sizes]
    order = torch.randperm(sum(widths), generator=generator).tolist()
    # Blocks nobody has written hold NaN: reading one token too many shows at once.
    key_blocks = torch.full((len(order), kv_heads, block_size, dim), math.nan, dtype=dtype)
    value_blocks = key_blocks.clone()
    chunks, keys, values = [], [], []
    for (length, new), width in zip(sizes, widths, strict=True):
        table = [order.pop() for _ in range(width)]
        keys.append(random(length, kv_heads, dim))
        values.append(random(length, kv_heads, dim))
        for position in range(length - new):
            block, offset = table[position // block_size], position % block_size
            key_blocks[block, :, offset] = keys[-1][position]
            value_blocks[block, :, offset] = values[-1][position]
        chunks.append(Chunk([0] * new, length - new, table, num_logits=1))
    batch = pack(chunks, block_size, torch.device("cpu"))
    new_keys = torch.cat([key[-new:] for key, (_, new) in zip(keys, sizes, strict=True)])
    new_values = torch.cat([value[-new:] for value, (_, new) in zip(values, sizes, strict=True)])
    query = random(len(new_keys), heads, dim)
    call = LayerCall(query, new_keys, new_values, key_blocks, value_blocks, 0.3, None, None, None)
    return Case(batch, call, keys, values)


def written_out(case: Case) -> torch.Tensor:
    """Every row by itself, in float64."""
    call, out = case.call, []
    heads, dim = call.query.shape[1:]
    group = heads // call.key.shape[1]
    for span, keys, values in zip(case.batch.spans, case.keys, case.values, strict=True):
        for row in range(span.num_rows):
            position = span.start + row
            first = 0 if call.sliding_window is None else max(0, position - call.sliding_window + 1)
            for head in range(heads):
                kv_head = head // group
                query = call.query[span.first_row + row, head].double()
                scores = keys[first : position + 1, kv_head].double() @ query * call.scaling
                if call.softcap is not None:
                    scores = call.softcap * torch.tanh(scores / call.softcap)
                weights = scores.exp()
                sink = 0.0 if call.sinks is None else call.sinks[head].double().exp()
                out.append(weights @ values[first : position + 1, kv_head].double() / (weights.sum() + sink))
    return torch.stack(out).view(-1, heads, dim)


def run(backend: Backend, case: Case) -> torch.Tensor:
    backend.plan(case.batch)
    return backend.attend(case.call)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 8, 32])
@pytest.mark.parametrize("sizes", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("feature", ["none", "window", "softcap", "sinks", "all"])
def test_equal_to_attention_written_out(
    backend: type[Backend], block_size: int, sizes: list[tuple[int, int]], feature: str
) -> None:
    case = make_case(sizes, block_size, torch.float32)
    plain = written_out(case)
    case.call = replace(
        case.call,
        sliding_window=7 if feature in ("window", "all") else None,
        softcap=0.8 if feature in ("softcap", "all") else None,
        sinks=torch.linspace(-1, 2, HEADS) if feature in ("sinks", "all") else None,
    )
    expected = written_out(case)
    torch.testing.assert_close(run(backend(), case).double(), expected, atol=2e-6, rtol=1e-5)
    assert feature == "none" or (expected - plain).abs().max() > 0.05, "the feature changes nothing here"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 8, 31, 32, 33])
def test_windows_that_end_at_block_borders(backend: type[Backend], window: int) -> None:
    case = make_case([(length, 1) for length in range(1, 70, 3)], 8, torch.float32)
    case.call = replace(case.call, sliding_window=window)
    torch.testing.assert_close(run(backend(), case).double(), written_out(case), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_keys_and_values_are_stored_where_the_table_says(backend: type[Backend]) -> None:
    case = make_case(MIXED, 8, torch.float32)
    run(backend(), case)
    for index, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        for position in range(len(keys)):
            block, offset = case.batch.block_tables[index, position // 8], position % 8
            assert torch.equal(case.call.key_blocks[block, :, offset], keys[position])
            assert torch.equal(case.call.value_blocks[block, :, offset], values[position])


@pytest.mark.long  # a kernel of its own to compile
@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_rounded_once(backend: type[Backend]) -> None:
    case = make_case(DECODES, 32, torch.bfloat16)
    got = run(backend(), case)
    assert got.dtype == torch.bfloat16
    # One unit in the last of bfloat16's 8 bits, and a little for the reference's rounded weights.
    torch.testing.assert_close(got.double(), written_out(case), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_far_apart_neither_overflow_nor_vanish(backend: type[Backend]) -> None:
    case = make_case(DECODES, 8, torch.float32)
    case.call = replace(case.call, query=case.call.query * 4000)
    got = run(backend(), case)
    # Scores differ by hundreds, so exp() of one of them alone is infinite and the answer is one token's value.
    for span, keys, values in zip(case.batch.spans, case.keys, case.values, strict=True):
        best = (keys[:, 0] @ case.call.query[span.first_row, 0]).argmax()
        torch.testing.assert_close(got[span.first_row, 0], values[best, 0], atol=1e-3, rtol=1e-3)


def test_a_sequence_s_answer_does_not_depend_on_its_neighbours() -> None:
    case = make_case(DECODES, 32, torch.float32)
    together = run(NumbaBackend(), case)
    for index, span in enumerate(case.batch.spans):
        width = -(-span.length // 32)
        alone = Chunk([0], span.start, case.batch.block_tables[index, :width].tolist(), num_logits=1)
        row = slice(span.first_row, span.first_row + 1)
        call = replace(
            case.call, query=case.call.query[row], key=case.call.key[row], value=case.call.value[row]
        )
        backend = NumbaBackend()
        backend.plan(pack([alone], 32, torch.device("cpu")))
        assert torch.equal(backend.attend(call)[0], together[span.first_row])


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (7, 1), (16, 1), (6, 6)])
@pytest.mark.parametrize("dim", [8, 80, 256, 20])
def test_any_group_and_head(heads: tuple[int, int], dim: int) -> None:
    case = make_case([(40, 1), (21, 3), (30, 19)], 16, torch.float32, *heads, dim)
    case.call = replace(case.call, scaling=0.1)
    torch.testing.assert_close(run(NumbaBackend(), case).double(), written_out(case), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [5, 16, 200])
@pytest.mark.parametrize("window", [None, 5, PIECE_TOKENS, PIECE_TOKENS + 7])
def test_sequences_of_several_pieces(block_size: int, window: int | None) -> None:
    """One row, a few across the end of a piece, many; windows that begin within a piece."""
    sizes = [(LONG, 1), (2 * PIECE_TOKENS + 4, TILE_ROWS), (LONG, 3), (LONG, TILE_ROWS + 1), (9, 1)]
    case = make_case(sizes, block_size, torch.float32, 3, 1, 8)
    case.call = replace(case.call, sliding_window=window)
    torch.testing.assert_close(run(NumbaBackend(), case).double(), written_out(case), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5, PIECE_TOKENS + 7])
def test_pieces_cover_each_row_s_pages_once(window: int | None) -> None:
    sizes = [(LONG, 1), (3 * LONG, 4), (LONG, 2 * TILE_ROWS + 1), (1, 1)]
    batch = make_case(sizes, 16, torch.float32).batch
    found = cut(batch, 16, window)
    for span in batch.spans:
        for row in range(span.first_row, span.end_row):
            mine = [p for p in found.pieces.tolist() if p[ROW] <= row < p[ROW] + p[ROWS]]
            pages = [page for piece in mine for page in range(piece[FIRST], piece[END])]
            position = span.start + row - span.first_row
            oldest = 0 if window is None else max(0, position - window + 1)
            assert pages == list(range(pages[0], pages[-1] + 1))
            assert pages[0] <= oldest // 16
            assert pages[-1] >= position // 16
            assert (len(mine) > 1) == (mine[0][SLOT] >= 0)
    slots = [p[SLOT] + r for p in found.pieces.tolist() if p[SLOT] >= 0 for r in range(p[ROWS])]
    assert sorted(slots) == list(range(found.slots))


def test_where_a_sequence_is_cut_does_not_depend_on_its_neighbours() -> None:
    alone = make_case([(LONG, 1)], 16, torch.float32).batch
    among = make_case([(9, 1), (LONG, 1), (LONG, 30)], 16, torch.float32).batch
    pages = [cut(batch, 16, None).pieces[:, [FIRST, END]].tolist() for batch in (alone, among)]
    assert pages[0] == pages[1][1 : 1 + len(pages[0])]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_more_threads_change_no_bit(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([*MIXED, (LONG, 1)], 8, torch.float32)
    alone = run(NumbaBackend(), case)
    monkeypatch.setattr("engine.attention.numba_cpu.ALONE", 0)
    backend = NumbaBackend()
    monkeypatch.setattr(backend, "_threads", threads)
    monkeypatch.setattr("numba.set_num_threads", lambda _: None)
    assert torch.equal(run(backend, case), alone)


def test_a_small_batch_that_one_thread_attends_leaves_all_threads_to_the_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = NumbaBackend()
    monkeypatch.setattr(backend, "_threads", 2)
    asked: list[int] = []
    monkeypatch.setattr("numba.set_num_threads", asked.append)
    run(backend, make_case([(3, 1)], 8, torch.float32))
    assert asked == [1, 2]


@pytest.mark.long
def test_torch_keeps_the_threads_it_was_told() -> None:
    """Numba's threads, one a core, start with its first parallel loop."""
    code = (
        "import numba, torch\n"
        "from engine.attention.numba_cpu import NumbaBackend\n"
        "NumbaBackend()\n"
        "@numba.njit(parallel=True)\n"
        "def count(n):\n"
        "    total = 0\n"
        "    for _ in numba.prange(n):\n"
        "        total += 1\n"
        "    return total\n"
        "print(count(8), torch.get_num_threads(), numba.get_num_threads())\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("8 1 1\n", 0), done.stderr


def test_half_precision_falls_to_the_reference() -> None:
    assert choose_backend(torch.device("cpu"), torch.float16).name == "reference"
    assert choose_backend(torch.device("cpu"), torch.float32).name == "numba"


@pytest.mark.parametrize(
    ("device", "dtype", "tokens"),
    [("cpu", "float32", 8), ("cpu", "float16", 8), ("cuda", "float32", 16), ("mps", "float16", 16)],
)
def test_blocks_are_larger_where_no_cpu_reads_them(device: str, dtype: str, tokens: int) -> None:
    backend = choose_backend(torch.device(device), getattr(torch, dtype))
    assert backend.kv_layout.usual_block_size == tokens
