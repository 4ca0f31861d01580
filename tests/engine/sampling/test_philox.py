"""Random numbers, against their authors' own."""

from __future__ import annotations

import numpy as np
import pytest

from engine.sampling import philox
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
    numbers = uniform([1, 2, 1, 1, 2**64 - 1, 1 + 2**32], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], 5)
    assert numbers.shape == (6, 5)
    assert len(set(numbers.ravel().tolist())) == 30
    assert uniform([2], [0], [0], 200)[0, :5].tolist() == numbers[1].tolist()
    assert uniform([2], [0], [0], 4)[0].tolist() == numbers[1, :4].tolist()


@pytest.mark.parametrize(("word", "number"), [(0, 2.0**-53), (2**32 - 1, 1 - 2.0**-53)])
def test_no_number_is_0_or_1(word: int, number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either would be infinite noise, or none."""
    monkeypatch.setattr(philox, "philox4x32", lambda counter, _: np.full_like(counter, word))
    numbers = uniform([3], [0], [0], 2)
    assert numbers.tolist() == [[number, number]]
    noise = -np.log1p(-numbers)
    assert ((noise > 0) & np.isfinite(noise)).all()


def test_uniform_numbers_are_uniform_at_every_place() -> None:
    """Mean and variance of all of them; the mean of each place over many seeds, and of each seed over its places."""
    numbers = uniform(range(2000), [0] * 2000, [0] * 2000, 141)
    assert abs(numbers.mean() - 1 / 2) < 4 * (1 / 12 / numbers.size) ** 0.5
    assert abs(numbers.var() - 1 / 12) < 4 * (1 / 180 / numbers.size) ** 0.5
    assert np.abs(numbers.mean(axis=0) - 1 / 2).max() < 5 * (1 / 12 / 2000) ** 0.5
    assert np.abs(numbers.mean(axis=1) - 1 / 2).max() < 5 * (1 / 12 / 141) ** 0.5
