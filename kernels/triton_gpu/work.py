"""Who attends to what: the work lists of a step, made on the host. Knows no Triton and no GPU.

An item of work is eight int32:

    0 sequence        row of the block table
    1 first_token     of the tile, as packed
    2 num_tokens      queries in the tile; 0 does nothing
    3 first_position  of the first query in its sequence
    4 keys_from       first key, a whole number of tiles
    5 keys_to         one past the last key
    6 partial         where the unfinished sum goes; -1: this is all there is
    7 plain_to        keys before it are seen by every query of the tile: no mask

A sequence's only new token (decode) is cut into splits of SPLIT_TOKENS keys, counted from the
sequence's start, whatever else is in the batch; a fold is (token, first partial, partials, unused).
Several new tokens (prefill) are cut into tiles, the longest first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

SPLIT_TOKENS: Final = 256
"""Keys a program of decode goes over. Fixed, so that an answer does not depend on the batch."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """`items` [n, 8] and `folds` [m, 4], int32; `num_partials` rows of unfinished sums."""

    items: NDArray[np.int32]
    folds: NDArray[np.int32]
    num_partials: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """The rows with one new token, and those with more."""

    decode: WorkList
    prefill: WorkList


def step_work(
    row_starts: Sequence[int] | NDArray[np.int64],
    context_lengths: Sequence[int] | NDArray[np.int64],
    window: int,
    tile_tokens: int,
    decode_keys: int,
    prefill_keys: int,
) -> StepWork:
    """The work of a batch, as `PackedBatch` describes it.

    Args:
        row_starts: [num_rows + 1].
        context_lengths: [num_rows].
        window: how many of the last keys a query sees; 0: all.
        tile_tokens: most queries in a tile of prefill.
        decode_keys: keys in a tile of decode; divides SPLIT_TOKENS.
        prefill_keys: keys in a tile of prefill.
    """
    starts = np.asarray(row_starts, np.int64)
    lengths = np.asarray(context_lengths, np.int64)
    counts = np.diff(starts)
    rows, tokens = np.arange(len(counts)), starts[:-1]
    positions = lengths - counts
    one, more = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
    return StepWork(
        decode=_decode(rows[one], tokens[one], positions[one], window, decode_keys),
        prefill=_prefill(
            *(rows[more], tokens[more], positions[more], counts[more]),
            *(window, tile_tokens, prefill_keys),
        ),
    )


def _decode(
    rows: NDArray[np.int64],
    tokens: NDArray[np.int64],
    positions: NDArray[np.int64],
    window: int,
    tile_keys: int,
) -> WorkList:
    """One new token each, in splits."""
    ends = positions + 1
    begins = _first_keys(positions, window, tile_keys)
    first = begins // SPLIT_TOKENS
    counts = -(-ends // SPLIT_TOKENS) - first
    owner, place = _spread(counts)
    splits = first[owner] + place
    keys_from = np.maximum(begins[owner], splits * SPLIT_TOKENS)
    keys_to = np.minimum(ends[owner], (splits + 1) * SPLIT_TOKENS)
    kept = np.where(counts > 1, counts, 0)
    first_partials = np.cumsum(kept) - kept
    is_split = counts > 1
    partials = np.where(is_split[owner], first_partials[owner] + place, -1)
    plain_to = keys_from if window else keys_to // tile_keys * tile_keys
    items = (
        *(rows[owner], tokens[owner], np.ones_like(owner), positions[owner]),
        *(keys_from, keys_to, partials, np.maximum(plain_to, keys_from)),
    )
    folds = (tokens[is_split], first_partials[is_split], counts[is_split], 0 * counts[is_split])
    return WorkList(_table(items), _table(folds), int(kept.sum()))


def _prefill(
    rows: NDArray[np.int64],
    tokens: NDArray[np.int64],
    positions: NDArray[np.int64],
    counts: NDArray[np.int64],
    window: int,
    tile_tokens: int,
    tile_keys: int,
) -> WorkList:
    """Several new tokens each, in tiles."""
    owner, place = _spread(-(-counts // tile_tokens))
    before = place * tile_tokens
    num_tokens = np.minimum(tile_tokens, counts[owner] - before)
    first = positions[owner] + before
    keys_from = _first_keys(first, window, tile_keys)
    keys_to = first + num_tokens
    plain_to = keys_from if window else (first + 1) // tile_keys * tile_keys
    items = (
        *(rows[owner], tokens[owner] + before, num_tokens, first),
        *(keys_from, keys_to, np.full_like(owner, -1), np.maximum(plain_to, keys_from)),
    )
    longest_first = np.argsort(keys_from - keys_to, kind="stable")
    none = np.zeros((0, 4), np.int32)
    return WorkList(_table(items)[longest_first], none, 0)


def _first_keys(positions: NDArray[np.int64], window: int, tile_keys: int) -> NDArray[np.int64]:
    """The tile's beginning in which the first key lies that a query at `positions` sees."""
    if not window:
        return np.zeros_like(positions)
    first: NDArray[np.int64] = np.maximum(positions - window + 1, 0) // tile_keys * tile_keys
    return first


def _spread(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For `counts[i]` parts of each i: whose part each is, and which of its parts.

    >>> [part.tolist() for part in _spread(np.array([2, 1, 3]))]
    [[0, 0, 1, 2, 2, 2], [0, 1, 0, 0, 1, 2]]
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, place


def _table(columns: Sequence[NDArray[np.int64]]) -> NDArray[np.int32]:
    return np.stack(columns, axis=1).astype(np.int32)
