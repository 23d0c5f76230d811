"""The toy model in plain integers, and a pool that is a dictionary: the reference for walks."""

import numpy as np

from services.executor.model.toy import ENDING, EOS, PRINTABLE, UNLIKELY, VOCAB_SIZE

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(word):
    """The finaliser of splitmix64."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


def toy_logits(context):
    """[VOCAB_SIZE] float32 after `context`, a list of (token, stored position)."""
    total = 0
    for index, (token, position) in enumerate(context):
        stored = (position & 0xFFFFFFFF) << 32 | (token & 0xFFFFFFFF)
        total += mix(stored + (index + 1) * GAMMA & MASK)
    state = mix(total & MASK)
    logits = np.array([UNLIKELY - token / 128 for token in range(VOCAB_SIZE)], np.float32)
    for token in PRINTABLE:
        logits[token] = ((mix(state ^ token * GAMMA & MASK) >> 48) << 7 | token) * 2.0**-20
    if (state >> 20) % 128 == 0:
        logits[EOS] = ENDING
    return logits


class PlainPool:
    """A pool of (token, position), one dictionary entry a place."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.places = {}

    def place(self, block, offset):
        """What lies in one place; (-1, -1) if nothing was ever written there."""
        return self.places.get((block, offset), (-1, -1))

    def write(self, table, position, token):
        """Store a token of a sequence."""
        self.places[table[position // self.block_size], position % self.block_size] = (
            token,
            position,
        )

    def context(self, table, length):
        """What a sequence's table reaches."""
        size = self.block_size
        return [self.place(table[i // size], i % size) for i in range(length)]

    def copy_from(self, other, source, destination):
        """One whole block."""
        for offset in range(self.block_size):
            self.places[destination, offset] = other.place(source, offset)
