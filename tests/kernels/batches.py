"""Ragged batches, those of the GPU check, in pools; and a dense float64 answer to each."""

import torch
from torch import Tensor

from kernels.interface import Kernels, PoolSpec
from ops.gpu.batches import Case, Drawn, draw, pack
from shared.geometry import ModelShape

__all__ = ["HEADS_OF", "Case", "Drawn", "dense_attention", "draw", "filled_pool", "pack", "poison"]

HEADS_OF = {"grouped": (9, 3), "one for all": (4, 1), "each its own": (2, 2), "seven": (14, 2)}


def poison(pool: Tensor) -> None:
    """NaN everywhere: all ones are NaN in any float, also where an int8 pool has its scales."""
    pool.view(torch.uint8).fill_(0xFF)


def filled_pool(
    kernels: Kernels,
    drawn: Drawn,
    layer: int,
    *,
    is_poisoned: bool = True,
    kv_dtype: torch.dtype | None = None,
) -> Tensor:
    """A pool with every sequence's keys and values in `layer`, NaN (or zero) everywhere else."""
    case = drawn.case
    shape = ModelShape(case.num_layers, case.heads, case.kv_heads, case.head_dim, 64, 100, 4096)
    pool = kernels.allocate_pool(
        PoolSpec(
            *(shape, drawn.num_blocks, case.block_size, kv_dtype or kernels.dtype),
            torch.device("cpu"),
        )
    )
    pool.zero_()
    if is_poisoned:
        poison(pool)
    for row, (keys, values) in enumerate(zip(drawn.keys, drawn.values, strict=True)):
        places = torch.arange(len(keys))
        blocks = drawn.batch.block_tables[row, places // case.block_size].long()
        slots = blocks * case.block_size + places % case.block_size
        kernels.write_kv(pool, layer, keys, values, slots)
    return pool


def dense_attention(drawn: Drawn, scale: float, window: int | None = None) -> Tensor:
    """Causal softmax attention over plain matrices, in float64."""
    group = drawn.case.heads // drawn.case.kv_heads
    starts = drawn.batch.row_starts.tolist()
    answers = []
    for row, (keys, values) in enumerate(zip(drawn.keys, drawn.values, strict=True)):
        queries = drawn.queries[starts[row] : starts[row + 1]].double()
        k = keys.double().repeat_interleave(group, 1)
        v = values.double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, k) * scale
        new, length = len(queries), len(keys)
        keys_after = torch.arange(length) - torch.arange(length - new, length)[:, None]
        unseen = (keys_after > 0) | (keys_after <= -(window or length))
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        answers.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(answers)
