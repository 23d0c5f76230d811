"""How large the tiles of attention are on a GPU. Triton takes any; a GPU does not.

Chosen by compiling for each architecture: nothing spills, and all fits in shared memory. Products
of float32 are not tensor cores', which round its numbers: their tiles lie in registers, and are
small.
"""

from dataclasses import dataclass
from typing import Final

SHARED_A100: Final = 166_912
SHARED_H100: Final = 232_448
SHARED_MI300: Final = 65_536
"""Bytes of shared memory one program may take: sm_80; sm_90 and sm_100; gfx942."""
FLOAT32_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` of (query, head) times `keys`; `warps` and `stages` are the compiler's."""

    rows: int
    keys: int
    warps: int
    stages: int


def padded(number: int) -> int:
    """The next power of two, 16 at least: what a tile's side may be.

    >>> padded(5), padded(80), padded(128)
    (16, 128, 128)
    """
    return max(16, 1 << (number - 1).bit_length())


def decode_tile(head_dim: int, element_bytes: int, kv_bytes: int, group: int) -> Tile:
    """For one query: its group of heads, and as many keys as are in flight at once.

    Args:
        element_bytes: of a number of the queries; `kv_bytes` of one in the pool.
        group: query heads of a key-value head.
    """
    wide = _is_wide(head_dim, element_bytes)
    most = 32 if wide or kv_bytes == 1 else 64
    keys = 16 if wide and element_bytes == FLOAT32_BYTES else most
    return Tile(rows=padded(group), keys=keys, warps=4, stages=2)


def prefill_tile(head_dim: int, element_bytes: int, group: int, shared_bytes: int) -> Tile:
    """For a chunk of a prompt; `shared_bytes` a program may take."""
    wide, roomy = _is_wide(head_dim, element_bytes), shared_bytes >= SHARED_H100
    if element_bytes == FLOAT32_BYTES:
        return Tile(max(32, padded(group)), 16 if wide else 32, warps=8 if wide else 4, stages=2)
    rows = max(128 if wide and roomy else 64, padded(group))
    keys = 64 if roomy and not wide else 32
    return Tile(rows, keys, warps=8 if wide or rows > 64 else 4, stages=2)


def _is_wide(head_dim: int, element_bytes: int) -> bool:
    """Whether a key takes more than 128 numbers of 16 bits."""
    return padded(head_dim) * element_bytes > 256
