"""One step's tokens in one row."""

from __future__ import annotations

import pytest
import torch

from engine.attention import Span, pack
from engine.interface import Chunk

CPU = torch.device("cpu")


def test_decodes_and_prompts_lie_one_after_the_other() -> None:
    chunks = [
        Chunk([7], 7, [4, 1, 9], num_logits=1),
        Chunk([20, 21, 22, 23, 24], 2, [3, 5, 0], num_logits=2),
        Chunk([30], 3, [8], num_logits=0),
    ]
    batch = pack(chunks, 4, CPU)
    assert batch.input_ids.tolist() == [[7, 20, 21, 22, 23, 24, 30]]
    assert batch.position_ids.tolist() == [[7, 2, 3, 4, 5, 6, 3]]
    assert batch.logit_rows.tolist() == [0, 4, 5]
    assert batch.slot_blocks.tolist() == [1, 3, 3, 5, 5, 5, 8]
    assert batch.slot_offsets.tolist() == [3, 2, 3, 0, 1, 2, 3]
    assert batch.spans == [Span(0, 1, 7), Span(1, 5, 2), Span(6, 1, 3)]
    assert batch.block_tables.tolist() == [[4, 1], [3, 5], [8, 0]]  # only blocks that hold tokens


@pytest.mark.parametrize("follows", [(2, 0), (0, 0), (1, 2)])
def test_tokens_that_are_not_known_yet_come_from_what_was_drawn(follows: tuple[int, int]) -> None:
    drawn = torch.tensor([50, 51, 52])
    chunks = [
        Chunk([0], 7, [4, 1], 1, follows=follows[0]),
        Chunk([6], 2, [3], 1),
        Chunk([8, 9, 0], 0, [5], 1, follows=follows[1]),
    ]
    batch = pack(chunks, 4, CPU, drawn)
    assert batch.input_ids.tolist() == [[50 + follows[0], 6, 8, 9, 50 + follows[1]]]
    assert drawn.tolist() == [50, 51, 52]
