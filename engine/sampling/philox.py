"""Random numbers that depend on what they are for, not on what was drawn before.

Philox4x32-10, a counter-based generator: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011. Every draw is a function of (seed, choice, position), so a request draws the
same numbers in any batch, after a preemption, and when another worker goes on with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10

Words = npt.NDArray[np.uint64]
"""32-bit words, kept in 64 bits so that a product of two of them fits."""


def philox4x32(counter: Words, key: Words) -> Words:
    """Encrypt counters.

    Args:
        counter: uint64 `[4, ...]`, values below 2**32.
        key: uint64 `[2, ...]`, values below 2**32.

    Returns:
        uint64 `[4, ...]`, uniform below 2**32.
    """
    even, odd = counter[::2], counter[1::2]
    shape = (2,) + (1,) * (counter.ndim - 1)
    multipliers, weyl = _MULTIPLIERS.reshape(shape), _WEYL.reshape(shape)
    for _ in range(_ROUNDS):
        product = (multipliers * even)[::-1]
        even, odd = (product >> _SHIFT) ^ (odd ^ key), product & _LOW
        key = (key + weyl) & _LOW
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniform(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], size: int
) -> npt.NDArray[np.float64]:
    """Numbers between 0 and 1, and neither of them, for each (seed, choice, position), of 52 random bits each.

    Args:
        seeds: below 2**64 each; they are the key.
        choices: below 2**32 each.
        positions: below 2**32 each: which output token the draw is for, from 0.
        size: numbers each; the first of more are the same.

    Returns:
        float64 `[n, size]`, from 2**-53 to 1 - 2**-53.
    """
    seed, position, choice = (np.array(given, dtype=np.uint64) for given in (seeds, positions, choices))
    pairs = -(-size // 2)
    counter = np.zeros((4, len(seed), pairs), dtype=np.uint64)
    counter[0], counter[1], counter[2] = position[:, None], choice[:, None], np.arange(pairs, dtype=np.uint64)
    words = philox4x32(counter, np.stack([seed & _LOW, seed >> _SHIFT])[..., None])
    words >>= np.uint64(6)
    numbers = ((words[::2] << np.uint64(26)) + words[1::2]).transpose(1, 2, 0).reshape(len(seed), -1)
    return np.ldexp(numbers[:, :size].astype(np.float64) + 0.5, -52)  # below 2**52 a float64 holds halves
