"""The toy model: exact, and sensitive to every single thing a paged cache can get wrong.

Its pool stores a (token, position) pair a place. Its logits are a hash of *everything the block
table reaches*: each place's stored token, its stored position, and where in the sequence the table
puts it. A wrong block, a lost copy, a stale or unwritten place changes every logit, and nothing
rounds: the hash is integer arithmetic and a logit is a small integer times 2**-20.

Vocabulary: 0..255 are raw bytes, 256 ends a text, 257 begins one, 258..511 are reserved. It writes
printable ASCII (32..126), and ends with a chance of 1 in 128 a token.
"""

import time
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.interface import PackedBatch
from shared.geometry import ModelShape

EOS: Final = 256
BOS: Final = 257
VOCAB_SIZE: Final = 512
PRINTABLE: Final = range(32, 127)
MAX_POSITION_EMBEDDINGS: Final = 8192

UNLIKELY: Final = -64.0
"""Greatest logit of what the toy does not write by itself: id i has this less i/128.

So far below the others that no usual draw finds it, and near enough for a bias of 100 to fetch it.
"""
ENDING: Final = 12.0
"""Logit of the end where it is due: above all others, which lie in [0, 8)."""
_ENDING_CHANCE: Final = np.uint64(128)

_UNLIKELY_LOGITS: Final = (UNLIKELY - np.arange(VOCAB_SIZE) / 128).astype(np.float32)
_UNWRITTEN: Final = -1
_WORD: Final = np.uint64
# splitmix64's constants: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014
_GAMMA: Final = _WORD(0x9E3779B97F4A7C15)
_MIX_1: Final = _WORD(0xBF58476D1CE4E5B9)
_MIX_2: Final = _WORD(0x94D049BB133111EB)


class ToyModel:
    """A `DecoderModel` whose next token is a hash of its whole context.

    Args:
        step_s: how long a forward pass takes at least, standing for a real model's time.
    """

    shape = ModelShape(
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        hidden_size=1,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
    )
    eos_token_ids: tuple[int, ...] = (EOS,)
    kv_dtype = "int32"
    kv_bytes_per_token = 8
    times_auto = 1.0

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s = step_s

    def allocate_pool(self, num_blocks: int, block_size: int) -> Tensor:
        """[num_blocks, block_size, 2] int32: token and position of each place; -1 = unwritten."""
        return torch.full((num_blocks, block_size, 2), _UNWRITTEN, dtype=torch.int32)

    def allocate_swap_pool(self, num_blocks: int, block_size: int) -> Tensor:
        """Another pool."""
        return self.allocate_pool(num_blocks, block_size)

    def forward(self, pool: Tensor, batch: PackedBatch) -> Tensor:
        """Write each token and its position, then hash what the wanted tokens' tables reach.

        Returns: [num_logits, VOCAB_SIZE] float32.
        """
        if self._step_s:
            time.sleep(self._step_s)
        places = pool.numpy().reshape(-1, 2)
        slots = batch.slots.numpy()
        places[slots, 0] = batch.token_ids.numpy()
        places[slots, 1] = batch.positions.numpy()
        return torch.from_numpy(_logits(_context_hashes(pool.numpy(), batch)))

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks, [num_copies, 2] (source, destination)."""
        destination[pairs[:, 1]] = source[pairs[:, 0]]


def _context_hashes(pool: NDArray[np.int32], batch: PackedBatch) -> NDArray[np.uint64]:
    """[num_logits] uint64: for each wanted token, a hash of its context up to itself."""
    block_size = pool.shape[1]
    wanted = batch.logit_tokens.numpy()
    if not len(wanted):
        return np.zeros(0, _WORD)
    rows = np.searchsorted(batch.row_starts.numpy(), wanted, side="right") - 1
    lengths = batch.positions.numpy()[wanted].astype(np.int64) + 1
    tables = batch.block_tables.numpy()[rows]
    num_blocks = -(-lengths // block_size)
    starts = np.cumsum(num_blocks) - num_blocks  # of each context, among all the blocks reached

    reached = np.arange(tables.shape[1]) < num_blocks[:, None]
    blocks = tables[reached]
    logical = np.arange(len(blocks)) - np.repeat(starts, num_blocks)
    stored = pool.view(_WORD)[blocks, :, 0]  # token and position as one word
    index = (logical * block_size)[:, None] + np.arange(block_size)
    terms = _mix(stored + (index + 1).astype(_WORD) * _GAMMA)
    last = starts + num_blocks - 1
    terms[last] *= index[last] < lengths[:, None]
    hashes: NDArray[np.uint64] = np.add.reduceat(terms.sum(axis=1, dtype=_WORD), starts)
    return _mix(hashes)


def _logits(hashes: NDArray[np.uint64]) -> NDArray[np.float32]:
    """[n, VOCAB_SIZE] float32; no two are equal, and each is exact."""
    ids = np.arange(PRINTABLE.start, PRINTABLE.stop)
    noise = _mix(hashes[:, None] ^ (ids.astype(_WORD) * _GAMMA)) >> _WORD(48)
    distinct = noise << _WORD(7) | ids.astype(_WORD)  # 23 bits, all different in the last 7
    logits = np.tile(_UNLIKELY_LOGITS, (len(hashes), 1))
    logits[:, PRINTABLE.start : PRINTABLE.stop] = distinct.astype(np.float32) * 2.0**-20
    logits[(hashes >> _WORD(20)) % _ENDING_CHANCE == 0, EOS] = ENDING
    return logits


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    words = (words ^ (words >> _WORD(30))) * _MIX_1
    words = (words ^ (words >> _WORD(27))) * _MIX_2
    return words ^ (words >> _WORD(31))
