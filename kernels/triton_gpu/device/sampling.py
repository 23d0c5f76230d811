"""From logits to tokens on the GPU: the rules and the dice of the executor's CPU sampler.

The order of all tokens is by logit, greatest first, and among equal ones by id. A cut of it is
(key, id): the last token kept. Nobody sorts: a cut's key is found bit by bit, each bit by one pass
over the logits, which lie in the L2 cache; then, among the tokens of this key, its id.

A token weighs exp((logit - greatest) / temperature), float32. Its mass is that in whole units, as
services/executor/sampler.py says, so that sums, int64, are exact in any order.
"""

import triton
import triton.language as tl

NOBODY = tl.constexpr(2147483647)
"""An id after all others."""


@triton.jit
def uniform(seed, index, position):
    """One float64 in [0, 1): Philox4x32-10 with key `seed` and counter (`index`, `position`).

    Each is a 64-bit integer, taken as its low and its high word. Source: Salmon et al. 2011.
    """
    index = index.to(tl.uint64)
    position = position.to(tl.uint64)
    high, low, _, _ = tl.philox(
        seed.to(tl.uint64),
        (index & 0xFFFFFFFF).to(tl.uint32),
        (index >> 32).to(tl.uint32),
        (position & 0xFFFFFFFF).to(tl.uint32),
        (position >> 32).to(tl.uint32),
    )
    bits = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _order(logits):
    """float32 -> uint32 in the same order; -0.0 equals 0.0."""
    logits = tl.where(logits == 0.0, 0.0, logits)
    bits = logits.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _chunk(row, start, vocab_size, peak, divisor, cut_key, cut_id, CHUNK: tl.constexpr):
    """(ids, keys, weights) of CHUNK tokens; what is behind the cut, or no token, weighs -1."""
    ids = start + tl.arange(0, CHUNK)
    logits = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
    keys = _order(logits)
    weights = tl.exp(tl.div_rn(logits - peak, divisor))
    is_kept = (keys > cut_key) | ((keys == cut_key) & (ids <= cut_id))
    return ids, keys, tl.where(is_kept & (ids < vocab_size), weights, -1.0)


@triton.jit
def _measure(weights, is_counted, units):
    """int64 of each token that is counted: its mass, or 1 for being kept at all if `units` is 0."""
    masses = weights * units
    rounded = (masses + 8388608.0) - 8388608.0  # to the nearest whole number, ties to even
    masses = tl.where(masses < 8388608.0, rounded, masses)
    measures = tl.where(units > 0, masses.to(tl.int64), 1)
    return tl.where(is_counted & (weights >= 0), measures, 0)


@triton.jit
def _sum(
    row, vocab_size, peak, divisor, cut_key, cut_id, from_key, min_p, units, CHUNK: tl.constexpr
):  # fmt: skip
    """What the kept tokens measure whose key is `from_key` or more, and weight `min_p` or more."""
    total = tl.full((), 0, tl.int64)
    for start in range(0, vocab_size, CHUNK):
        _, keys, weights = _chunk(row, start, vocab_size, peak, divisor, cut_key, cut_id, CHUNK)
        total += tl.sum(_measure(weights, (keys >= from_key) & (weights >= min_p), units))
    return total


@triton.jit
def _cut(
    row, vocab_size, peak, divisor, cut_key, cut_id, wanted, units, CHUNK: tl.constexpr
):  # fmt: skip
    """The cut that leaves the fewest first tokens that measure `wanted`, 1 or more, together."""
    key = tl.full((), 0, tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    for _ in range(32):
        got = _sum(row, vocab_size, peak, divisor, cut_key, cut_id, key | bit, 0.0, units, CHUNK)
        key = tl.where(got >= wanted, key | bit, key)
        bit = bit >> 1
    before = _sum(row, vocab_size, peak, divisor, cut_key, cut_id, key + 1, 0.0, units, CHUNK)
    last = tl.full((), NOBODY, tl.int32)
    for start in range(0, vocab_size, CHUNK):
        ids, keys, weights = _chunk(row, start, vocab_size, peak, divisor, cut_key, cut_id, CHUNK)
        measures = _measure(weights, keys == key, units)
        is_enough = (before + tl.cumsum(measures) >= wanted) & (keys == key) & (weights >= 0)
        last = tl.minimum(last, tl.min(tl.where(is_enough, ids, NOBODY)))
        before += tl.sum(measures)
    return key, last


@triton.jit
def _drawn(
    row, vocab_size, peak, divisor, cut_key, cut_id, min_p, die, units, CHUNK: tl.constexpr
):  # fmt: skip
    """The token on which `die` falls when the mass of those kept is laid out by id."""
    total = _sum(row, vocab_size, peak, divisor, cut_key, cut_id, 0, min_p, units, CHUNK)
    ahead = tl.minimum((die * total.to(tl.float64)).to(tl.int64), total - 1)
    before = tl.full((), 0, tl.int64)
    token = tl.full((), NOBODY, tl.int32)
    for start in range(0, vocab_size, CHUNK):
        ids, _, weights = _chunk(row, start, vocab_size, peak, divisor, cut_key, cut_id, CHUNK)
        measures = _measure(weights, weights >= min_p, units)
        is_past = before + tl.cumsum(measures) > ahead
        token = tl.minimum(token, tl.min(tl.where(is_past, ids, NOBODY)))
        before += tl.sum(measures)
    return token


@triton.jit
def sample_kernel(
    tokens, logits, rows, temperatures, top_ks, top_ps, min_ps, seeds, indexes, positions,
    vocab_size, stride_row, units, CHUNK: tl.constexpr,
):  # fmt: skip
    """One token for each draw, or -1 where its logits hold NaN, +inf or nothing finite.

    grid = (draws,). `temperatures` 0 is greedy; `top_ks` 0 keeps all.
    """
    draw = tl.program_id(0)
    row = logits + tl.load(rows + draw).to(tl.int64) * stride_row
    peak = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    num_nan = tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
        num_nan += tl.sum((x != x).to(tl.int32))
        x = tl.where(x == x, x, float("-inf"))
        here = tl.max(x)
        first = tl.min(tl.where(x == here, ids, NOBODY))
        token = tl.where(here > peak, first, token)
        peak = tl.maximum(peak, here)
    if (num_nan > 0) | (tl.abs(peak) == float("inf")):
        tl.store(tokens + draw, -1)
        return

    temperature = tl.load(temperatures + draw)
    if temperature > 0:
        divisor = tl.maximum(temperature, 1.1754943508222875e-38)  # the smallest normal number
        top_k = tl.load(top_ks + draw)
        top_p = tl.load(top_ps + draw)
        cut_key = tl.full((), 0, tl.uint32)
        cut_id = tl.full((), NOBODY, tl.int32)
        if (top_k > 0) & (top_k < vocab_size):
            cut_key, cut_id = _cut(
                row, vocab_size, peak, divisor, cut_key, cut_id, top_k, 0.0, CHUNK
            )
        if top_p < 1:
            total = _sum(row, vocab_size, peak, divisor, cut_key, cut_id, 0, 0.0, units, CHUNK)
            wanted = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
            cut_key, cut_id = _cut(
                row, vocab_size, peak, divisor, cut_key, cut_id, wanted, units, CHUNK
            )
        die = uniform(tl.load(seeds + draw), tl.load(indexes + draw), tl.load(positions + draw))
        token = _drawn(
            row,
            vocab_size,
            peak,
            divisor,
            cut_key,
            cut_id,
            tl.load(min_ps + draw),
            die,
            units,
            CHUNK,
        )
    tl.store(tokens + draw, token)
