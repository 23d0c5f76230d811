"""Random ragged batches with block tables in any order, and a dense float64 answer to each."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import Kernels, PackedBatch, PoolSpec
from shared.geometry import ModelShape, blocks_in

HEADS_OF = {"grouped": (9, 3), "one for all": (4, 1), "each its own": (2, 2), "seven": (14, 2)}


@dataclass(frozen=True)
class Case:
    """What one batch is made of; `rows` are (context length, new tokens)."""

    rows: tuple[tuple[int, int], ...]
    block_size: int = 16
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    num_layers: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Drawn:
    """A batch with the keys, values and queries of every sequence, in the dtype under test."""

    case: Case
    batch: PackedBatch
    keys: list[Tensor]
    values: list[Tensor]
    queries: Tensor
    num_blocks: int


def draw(case: Case, dtype: torch.dtype) -> Drawn:
    """Random numbers and a shuffled block table with some blocks of nobody between."""
    random = torch.Generator().manual_seed(case.seed)
    lengths = [length for length, _ in case.rows]
    num_blocks = sum(blocks_in(length, case.block_size) for length in lengths) + 3
    batch = pack(
        case.rows, case.block_size, torch.randperm(num_blocks, generator=random).tolist(), random
    )

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    return Drawn(
        case,
        batch,
        keys=[normal(length, case.kv_heads, case.head_dim) for length in lengths],
        values=[normal(length, case.kv_heads, case.head_dim) for length in lengths],
        queries=normal(sum(new for _, new in case.rows), case.heads, case.head_dim),
        num_blocks=num_blocks,
    )


def pack(
    rows: tuple[tuple[int, int], ...], block_size: int, free: list[int], random: torch.Generator
) -> PackedBatch:
    """A PackedBatch of `rows`; blocks are taken from `free`; unused table entries are absurd."""
    width = max(blocks_in(length, block_size) for length, _ in rows) + 1
    tables = torch.full((len(rows), width), 2**31 - 1, dtype=torch.int32)
    for row, (length, _) in enumerate(rows):
        count = blocks_in(length, block_size)
        tables[row, :count] = torch.tensor(free[:count], dtype=torch.int32)
        free = free[count:]
    positions = torch.cat([torch.arange(length - new, length) for length, new in rows])
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([new for _, new in rows]))
    blocks = tables[owner, positions // block_size].long()
    starts = torch.tensor([0, *(new for _, new in rows)]).cumsum(0)
    return PackedBatch(
        token_ids=torch.randint(0, 100, (len(positions),), generator=random),
        positions=positions.int(),
        slots=blocks * block_size + positions % block_size,
        row_starts=starts.int(),
        context_lengths=torch.tensor([length for length, _ in rows], dtype=torch.int32),
        block_tables=tables,
        logit_tokens=starts[1:] - 1,
    )


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
