"""Random numbers, against their authors' own."""

from __future__ import annotations

import numpy as np
import pytest

from engine.sampling.philox import philox4x32, uniform


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_its_authors_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    columns = np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None]
    assert philox4x32(*columns)[:, 0].tolist() == words


def test_uniform_numbers_depend_on_each_of_seed_choice_and_position() -> None:
    numbers = uniform([1, 2, 1, 1, 2**64 - 1, 1 + 2**32], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0])
    assert len(set(numbers.tolist())) == 6
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert uniform([2], [0], [0])[0] == numbers[1]
