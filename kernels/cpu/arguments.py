"""What compiled bodies are told: a block of int64 words each, at these places.

Addresses are in bytes. Plain numbers, so that running compiled code needs no compiler imported.
"""

import struct
from typing import Final

WIDTH: Final = 16
"""Floats handled at once: keys of a tile, numbers of a `Vector`."""

CHUNK_KEYS: Final = 128
"""Keys scored before their values are added; scores of a chunk stay in the first-level cache."""

PART_KEYS: Final = 256
"""Keys of one item where a single query's keys are cut; depends on nothing but this number."""

TILE_ROWS: Final = 24
"""Query rows (queries x heads of a group) that one item may hold, if it has more than one query."""

# Every body but the work list: a shared counter, and how many things it counts.
NEXT, COUNT = 0, 1

# Attention.
WORKER, ITEMS, GROUPS, PARTIALS, SCRATCH, SCRATCH_BYTES = range(2, 8)
QUERIES, POOL, TABLES, OUT, HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = range(8, 16)
BLOCK_BYTES, HEAD_BYTES, TABLE_BYTES, SCALE = range(16, 20)
ATTENTION_WORDS: Final = 20

# An item of attention: its first query sees `VISIBLE` keys, each next one sees one more.
ROW, HEAD, FIRST_TOKEN, NUM_QUERIES, FIRST_KEY, END_KEY, VISIBLE, PARTIAL, GROUP_INDEX = range(9)
ITEM_WORDS: Final = 9

# The parts of one query's keys that are merged when all are done.
FIRST_PARTIAL, NUM_PARTS, DONE = range(3)
GROUP_WORDS: Final = 3

# The list of a step's items.
W_ROW_STARTS, W_LENGTHS, W_NUM_ROWS, W_KV_HEADS, W_TILE, W_ITEMS, W_GROUPS = range(7)
W_NUM_ITEMS, W_NUM_PARTIALS = 7, 8  # results
WORK_WORDS: Final = 9

# Add and norm: [COUNT rows, SIZE].
RUN, RESIDUAL, DELTA, WEIGHT, NORMED, SIZE, EPS = range(2, 9)
NORM_WORDS: Final = 9

# Gated activation: [COUNT rows, 2 x HALF] to [COUNT rows, HALF].
GATE_UP, ACTIVATED, HALF = range(3, 6)  # word 2 is RUN
SILU_WORDS: Final = 6

# Rotary positions and cache writes, a token at a time.
QKV, ROTARY, R_SLOTS, R_QUERIES, R_POOL, R_HEADS, R_KV_HEADS = range(3, 10)
R_HEAD_DIM, R_BLOCK_SIZE, R_BLOCK_BYTES, R_HEAD_BYTES = range(10, 14)
ROTATE_WORDS: Final = 14

# Whole blocks copied, `C_PIECES` pieces each: pairs of block ids, source and destination.
C_SOURCE, C_DESTINATION, C_PAIRS, C_BLOCK_BYTES, C_PIECES, C_PIECE_BYTES = range(3, 9)  # 2 is RUN
COPY_WORDS: Final = 9

COPY_VECTOR: Final = 64
"""Bytes copied at once: a cache line."""

# A team of threads, one cache line for what all change and one for what they read.
T_STATE, T_SLEEPERS, T_STOP = range(3)
T_BODY, T_BLOCK, T_LIMIT, T_SPINS = range(8, 12)
TEAM_WORDS: Final = 16

# Matrix products: COUNT tiles of 16 outputs, each `P_STEPS` vectors of weights.
P_INPUT, P_INPUT_STRIDE, P_TILES, P_STEPS, P_OUTPUT, P_OUTPUT_STRIDE, P_BIAS, P_ROWS = range(2, 10)
PRODUCT_WORDS: Final = 10

# Rows of a matrix in tiles: COUNT token ids (int64), each a row of `E_STEPS` words.
E_IDS, E_TILES, E_STEPS, E_OUT = range(3, 7)  # word 2 is RUN
EMBED_WORDS: Final = 7

PRODUCT_ROWS: Final = 12
PRODUCT_TILES: Final = 2
"""Inputs and tiles of one innermost loop: 24 sums, which 32 vector registers hold."""


def padded(head_dim: int) -> int:
    """Floats of a row of sums: whole vectors."""
    return -(-head_dim // WIDTH) * WIDTH


def scratch_bytes(rows: int, head_dim: int) -> int:
    """Bytes a thread needs for items of up to `rows` query rows, a whole number of cache lines.

    Queries; sums, maxima and weights, twice; scores; a tile of gathered keys.
    """
    floats = rows * (3 * padded(head_dim) + 4 + CHUNK_KEYS) + padded(head_dim) * WIDTH
    return -(-4 * floats // 64) * 64


def partial_bytes(group: int, head_dim: int) -> int:
    """Bytes of one part's result: for each head its sums, its maximum and its total weight."""
    return 4 * group * (padded(head_dim) + 2)


def float_bits(value: float) -> int:
    """A float32's bits, the low half of a word."""
    return int.from_bytes(struct.pack("<f", value), "little")
