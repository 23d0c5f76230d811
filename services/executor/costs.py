"""What giving way costs on this machine: measured at start, in at most about a quarter of a second.

On a CPU on pools of its own, which are gone afterwards: those that serve stay untouched. On a GPU
by plans (gpu/rehearsal.py). A slow or busy machine measures less, each cost once at least; what
steps take later corrects it anyway.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from services.executor.batch import flatten, pack
from services.executor.kv_pool import KVPools
from services.executor.model.interface import DecoderModel
from shared.geometry import blocks_in
from shared.ids import BlockId, SequenceId
from shared.messages import Costs, Move, Row

SCRATCH_BYTES: Final = 32 * 2**20
"""Of each pool: more than the processor's caches hold, so that memory is measured."""
MOST_BLOCKS: Final = 1024
"""Of each pool, where blocks are small."""
COUNTS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Blocks moved at once: what requests of a few tokens to about a thousand hold."""

SHORTEST_PROMPT: Final = 16
LONGEST_PROMPT: Final = 512

MOVES_S: Final = 0.1
"""No larger move is begun after so long."""
ALL_S: Final = 0.25
"""No longer prompt is begun that would not be done by then."""

Clock = Callable[[], float]
Mover = Callable[[Sequence[Move]], None]
"""Moves blocks, all of them when it returns."""


def measure_costs(
    model: DecoderModel,
    block_size: int,
    block_bytes: int,
    max_model_len: int,
    *,
    can_swap: bool,
    clock: Clock = time.perf_counter,
) -> Costs:
    """On the CPU. The copy rate is 0, not known, if there is no swap space."""
    began = clock()
    copy_rate = 0.0
    if can_swap:
        until = began + MOVES_S
        num_blocks = max(1, min(MOST_BLOCKS, SCRATCH_BYTES // block_bytes))
        pools = KVPools(model, num_blocks, block_size, num_blocks)
        num_blocks = _touch(pools, clock, until=(clock() + until) / 2)
        copy_rate = move_rate(
            *(pools.swap_out, pools.swap_in, num_blocks, block_bytes, clock), until=until
        )
    longest = min(LONGEST_PROMPT, max_model_len)
    pool = model.allocate_pool(blocks_in(longest, block_size), block_size)
    return Costs(
        block_bytes,
        copy_bytes_per_s=copy_rate,
        prefill_tokens_per_s=prefill_rate(
            lambda count: _compute_prompt(model, pool, block_size, count),
            *(longest, clock),
            until=began + ALL_S,
        ),
    )


def move_rate(
    swap_out: Mover,
    swap_in: Mover,
    num_blocks: int,
    block_bytes: int,
    clock: Clock,
    *,
    until: float,
) -> float:
    """Bytes a second from one pool to the other: the median over moves of few and many blocks.

    `num_blocks` of both pools are moved, from and to any place.
    """
    places = np.random.default_rng(0).permutation(num_blocks).tolist()
    for move in (swap_out, swap_in):
        move((_move(0, 0),))  # the first one wakes threads
    rates: list[float] = []
    first = 0
    for count in (count for count in COUNTS if count <= num_blocks):
        if rates and clock() > until:
            break
        for move in (swap_out, swap_in):
            chosen = [places[(first + i) % num_blocks] for i in range(count)]
            moves = [_move(block, num_blocks - 1 - block) for block in chosen]
            began = clock()
            move(moves)
            rates.append(count * block_bytes / (clock() - began))
            first += count
    return statistics.median(rates)


def _touch(pools: KVPools, clock: Clock, *, until: float) -> int:
    """Write to blocks of both pools. Returns: how many there was time for, one at least.

    Pages that were never written are no memory yet: copies from them are free.
    """
    num_touched = 0
    while num_touched < pools.num_gpu_blocks and (not num_touched or clock() <= until):
        pools.clear(BlockId(num_touched))
        num_touched += 1
    return num_touched


def _move(source: int, destination: int) -> Move:
    return Move(BlockId(source), BlockId(destination))


def prefill_rate(
    compute: Callable[[int], None], longest: int, clock: Clock, *, until: float
) -> float:
    """Tokens a second of the longest prompt that there is time for; shorter ones warm it up.

    `compute` is given the number of tokens, `longest` at most, and is done when it returns.
    """
    count = min(SHORTEST_PROMPT, longest)
    while True:
        began = clock()
        compute(count)
        ended = clock()
        next_count = min(2 * count, longest)
        if count == longest or ended + (ended - began) * next_count / count > until:
            return count / (ended - began)
        count = next_count


def _compute_prompt(
    model: DecoderModel, pool: torch.Tensor, block_size: int, num_tokens: int
) -> None:
    token_ids = tuple(i % model.shape.vocab_size for i in range(num_tokens))
    table = tuple(range(blocks_in(num_tokens, block_size)))
    flat = flatten([Row(SequenceId(0), token_ids, 0, table)], block_size)
    model.forward(pool, pack(flat, flat.token_ids, np.array([num_tokens - 1])))
