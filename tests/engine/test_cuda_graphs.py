"""Recorded decode steps, with a recorder that runs the function again on its buffers as a GPU's replay would."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine import loading
from engine.attention.varlen import VarlenBackend
from engine.cuda_graphs import bucket_sizes
from engine.interface import Chunk
from engine.loading import load_runner
from engine.model_runner import ModelRunner
from tests.engine.varlen_by_hand import varlen_by_hand

SEQS, BLOCKS = 7, 96
RECORD_DECODES = loading.record_decodes
Pair = tuple[ModelRunner, ModelRunner]


def again(run: Callable[[], None]) -> Callable[[], None]:
    run()
    return run


@pytest.fixture(scope="module", params=[(None, None), ("FA3", 4)], ids=["FA2", "FA3"])
def loaded(request: pytest.FixtureRequest, tiny_model_dir: Path) -> Pair:
    """The tiny Llama twice over the GPU backend: as it is, and with its decodes recorded."""
    active, block_size = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.loading.choose_backend", lambda *_: VarlenBackend(varlen_by_hand, active))

        def load(record: Callable[[ModelRunner, VarlenBackend, int], object]) -> ModelRunner:
            patch.setattr("engine.loading.record_decodes", record)
            loaded = load_runner(
                str(tiny_model_dir),
                dtype="float32",
                device="cpu",
                max_num_seqs=SEQS + 1,
                max_model_len=128,
                block_size=block_size,
                num_kv_blocks=BLOCKS,
            )
            return loaded.runner

        plain = load(lambda *_: "")
        return plain, load(lambda runner, backend, _: runner.record_decodes(backend, SEQS, again))


@pytest.fixture
def runners(loaded: Pair) -> Pair:
    """Both, with nothing counted yet; in their blocks lies what earlier tests wrote."""
    graphs = loaded[1]._graphs
    assert graphs is not None
    graphs.num_replays = graphs.num_padding_rows = 0
    return loaded


def sequences(runner: ModelRunner, count: int) -> list[Chunk]:
    """Prompts of different lengths in blocks in no order."""
    width = -(-40 // runner.block_size)
    order = torch.randperm(runner.num_kv_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [order[index * width : (index + 1) * width] for index in range(count)]
    return [
        Chunk([5 + 7 * index + at for at in range(3 + 5 * index)], 0, tables[index], num_logits=1)
        for index in range(count)
    ]


def both(runners: Pair, chunks: list[Chunk]) -> torch.Tensor:
    """The step by both, which must agree."""
    plain, recorded = (runner.forward(chunks) for runner in runners)
    torch.testing.assert_close(plain, recorded, atol=1e-4, rtol=1e-4)
    return plain


def following(chunk: Chunk, logits: torch.Tensor) -> Chunk:
    start = chunk.start + len(chunk.token_ids)
    return Chunk([int(logits.argmax())], start, chunk.block_table, num_logits=1)


def test_a_replayed_step_is_the_plain_step(runners: Pair) -> None:
    chunks = sequences(runners[0], SEQS)
    logits = both(runners, chunks)
    assert runners[1].num_replays == 0, "a prompt is no decode"
    # As sequences end, steps shrink: what stood in the rows that are padding now must be written nowhere.
    for rows in (7, 7, 5, 4, 3, 2, 1, 1):
        chunks = [following(chunk, row) for chunk, row in zip(chunks[:rows], logits, strict=False)]
        logits = both(runners, chunks)
    assert runners[1].num_replays == 8
    assert runners[1].num_padding_rows == (7 - 5) + (4 - 3)
    assert runners[0].num_replays == runners[0].num_padding_rows == 0


def test_padding_writes_to_no_block_that_is_given_out(runners: Pair) -> None:
    recorded = runners[1]
    chunks = sequences(recorded, 3)
    logits = recorded.forward(chunks)
    before = [part[: recorded.num_kv_blocks].clone() for pair in recorded._kv.layers for part in pair]
    written = set()
    for chunk, row in zip(chunks, logits, strict=True):
        step = following(chunk, row)
        written.add(step.block_table[step.start // recorded.block_size])
    recorded.forward([following(chunk, row) for chunk, row in zip(chunks, logits, strict=True)])
    assert recorded.num_padding_rows == 1
    for part, old in zip((part for pair in recorded._kv.layers for part in pair), before, strict=True):
        # By their bits: what nobody has written may be NaN, which equals nothing.
        same = part[: recorded.num_kv_blocks].view(torch.int32) == old.view(torch.int32)
        same = same.flatten(1).all(1)
        assert set((~same).nonzero()[:, 0].tolist()) <= written
        assert not torch.isnan(part[recorded.num_kv_blocks, :, 0]).any()


def test_steps_that_are_not_decodes_alone_are_computed(runners: Pair) -> None:
    first, second, third = sequences(runners[0], 3)
    logits = both(runners, [first, second])
    decode = following(first, logits[0])
    both(runners, [decode, third])
    both(runners, [Chunk([9], 8, second.block_table, num_logits=0), following(decode, logits[1])])
    assert runners[1].num_replays == 0


def test_more_sequences_than_were_recorded_are_computed(runners: Pair) -> None:
    chunks = sequences(runners[0], SEQS + 1)
    logits = both(runners, chunks)
    both(runners, [following(chunk, row) for chunk, row in zip(chunks, logits, strict=True)])
    assert runners[1].num_replays == 0


def test_logits_stay_what_they_were_when_the_next_step_is_replayed(runners: Pair) -> None:
    (chunk,) = sequences(runners[1], 1)
    step = following(chunk, runners[1].forward([chunk]))
    first = runners[1].forward([step])
    kept = first.clone()
    runners[1].forward([following(step, first)])
    assert torch.equal(first, kept)


def test_tokens_that_only_the_device_knows_are_replayed(runners: Pair) -> None:
    chunks = sequences(runners[0], 2)
    logits = both(runners, chunks)
    known = [following(chunk, row) for chunk, row in zip(chunks, logits, strict=True)]
    expected = runners[0].forward(known)
    drawn = torch.tensor([known[1].token_ids[0], known[0].token_ids[0]])
    unknown = [
        Chunk([0], chunk.start, chunk.block_table, num_logits=1, follows=entry)
        for chunk, entry in zip(known, (1, 0), strict=True)
    ]
    got = runners[1].forward(unknown, drawn)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert runners[1].num_replays == 1


def test_what_reads_lengths_on_the_host_is_not_recorded(
    runners: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = runners[0]._attention.backend
    assert isinstance(backend, VarlenBackend)
    monkeypatch.setattr(backend, "replayable", False)
    assert RECORD_DECODES(runners[0], backend, SEQS) == "no CUDA graphs"
    assert "reads lengths on the host" in caplog.text


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 65, 128, 200, 256])
def test_bucket_sizes(most: int) -> None:
    sizes = bucket_sizes(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert all(0 < after - before <= max(1, min(16, before)) for before, after in pairwise(sizes))
