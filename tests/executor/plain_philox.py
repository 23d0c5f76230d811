"""Philox4x32-10 and the uniform number of a draw, in plain integers: the reference."""

MASK = 0xFFFFFFFF


def philox4x32(counter, key):
    """Four words from four words and two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def words(number):
    """Low and high word of a 64-bit number."""
    return number & MASK, number >> 32 & MASK


def uniform(seed, index, position):
    """The die of one draw, in [0, 1)."""
    high, low, _, _ = philox4x32((*words(index), *words(position)), words(seed))
    return ((high << 32 | low) >> 11) * 2.0**-53
