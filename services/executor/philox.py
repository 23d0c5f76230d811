"""Philox4x32-10: random numbers that are a pure function of a key and a counter.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; checked
against the known answers of their library, Random123.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS: Final = 10
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)


def philox4x32(counters: NDArray[np.uint32], keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Four random words for each counter and key.

    Args:
        counters: [n, 4] uint32.
        keys: [n, 2] uint32.
    Returns: [n, 4] uint32.
    """
    c0, c1, c2, c3 = counters.astype(np.uint64).T
    k0, k1 = keys.astype(np.uint64).T
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def uniforms(
    seeds: Sequence[int], indexes: Sequence[int], positions: Sequence[int]
) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, sequence index, position): all the dice there are.

    The key is the seed's low and high word; the counter is the index's, then the position's, low
    and high word. The first two output words, high bits first, give 53 bits.

    Args:
        seeds: 64-bit integers, signed or unsigned.
        indexes: number of each sequence within its request, 0 .. 2**64 - 1.
        positions: place of the token to draw in its sequence, prompt included.
    """
    words = philox4x32(
        np.concatenate((_words(indexes), _words(positions)), axis=1),
        _words(seeds),
    ).astype(np.uint64)
    bits = (words[:, 0] << _HALF | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _words(numbers: Sequence[int]) -> NDArray[np.uint32]:
    """[n, 2]: low and high word of each number taken modulo 2**64."""
    wide = np.array([number & 0xFFFFFFFFFFFFFFFF for number in numbers], dtype=np.uint64)
    return np.stack((wide & _LOW, wide >> _HALF), axis=1).astype(np.uint32)
