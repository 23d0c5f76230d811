"""Random ragged batches with block tables in any order, in main memory.

Block tables are shuffled and their unused entries are absurd.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kernels.interface import PackedBatch
from shared.geometry import blocks_in


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


def on_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The same batch there."""
    return PackedBatch(*(getattr(batch, part.name).to(device) for part in fields(batch)))
