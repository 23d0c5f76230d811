"""Philox4x32-10: random numbers that are a pure function of a key and a counter.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; checked
against the known answers of their library, Random123.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ROUNDS: Final = 10
_MULTIPLIERS: Final = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL: Final = np.array([[[0x9E3779B9], [0xBB67AE85]]], np.uint64)
_STEPS: Final = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL
"""[round, key word, 1]: what is added to a key, before each round."""
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)


def philox4x32(counters: NDArray[np.uint32], keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Four random words for each counter and key.

    Args:
        counters: [n, 4] uint32.
        keys: [n, 2] uint32.
    Returns: [n, 4] uint32.
    """
    # Words 0 and 2 of a counter are multiplied, words 1 and 3 wait for the next round: as a pair
    # each, [2, n], so that NumPy is called once for both.
    multiplied, waiting = counters.astype(np.uint64).T.reshape(2, 2, -1).swapaxes(0, 1)
    for round_keys in (keys.astype(np.uint64).T + _STEPS) & _LOW:
        products = (_MULTIPLIERS * multiplied)[::-1]
        multiplied = (products >> _HALF) ^ waiting ^ round_keys
        waiting = products & _LOW
    words = np.stack((multiplied, waiting), axis=1)  # [pair, of it, n]
    return words.reshape(4, -1).T.astype(np.uint32)


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
