"""A plan's rows as flat arrays, and those packed for a forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.interface import PackedBatch
from shared.messages import Row


@dataclass(frozen=True)
class FlatRows:
    """All rows of a plan, laid end to end; every number still as the scheduler sent it.

    What follows from these numbers is computed once, when it is first asked for.

    Attributes:
        token_ids: [num_tokens] int64, PREVIOUS included.
        row_starts: [num_rows + 1] int64, first token of each row; the last entry is num_tokens.
        first_positions: [num_rows] int64.
        blocks: [num_entries] int64, the block tables.
        table_starts: [num_rows + 1] int64, first entry of each row's table.
        block_size: tokens a block.
    """

    token_ids: NDArray[np.int64]
    row_starts: NDArray[np.int64]
    first_positions: NDArray[np.int64]
    blocks: NDArray[np.int64]
    table_starts: NDArray[np.int64]
    block_size: int

    @cached_property
    def num_tokens(self) -> NDArray[np.int64]:
        """[num_rows] tokens of each row."""
        return self.row_starts[1:] - self.row_starts[:-1]

    @cached_property
    def context_lengths(self) -> NDArray[np.int64]:
        """[num_rows] tokens of each sequence after this step."""
        return self.first_positions + self.num_tokens

    @cached_property
    def row_of_token(self) -> NDArray[np.int64]:
        """[num_tokens] the row each token belongs to."""
        return np.arange(len(self.first_positions)).repeat(self.num_tokens)

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """[num_tokens] place of each token in its sequence."""
        offsets = self.first_positions - self.row_starts[:-1]
        return np.arange(len(self.token_ids)) + offsets[self.row_of_token]

    @cached_property
    def written(self) -> NDArray[np.int64]:
        """[num_tokens] the block each token is written to; tables must cover their positions."""
        first_entries = self.table_starts[self.row_of_token]
        written: NDArray[np.int64] = self.blocks[first_entries + self.positions // self.block_size]
        return written

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """[num_tokens] where each token is written; tables must cover their positions."""
        return self.written * self.block_size + self.positions % self.block_size


def flatten(rows: Sequence[Row], block_size: int) -> FlatRows:
    """Lay the rows end to end. Raises: OverflowError if a number is beyond 64 bits."""
    row_starts = _starts([len(row.token_ids) for row in rows])
    table_starts = _starts([len(row.block_table) for row in rows])
    return FlatRows(
        token_ids=_joined([row.token_ids for row in rows], int(row_starts[-1])),
        row_starts=row_starts,
        first_positions=np.array([row.first_position for row in rows], np.int64),
        blocks=_joined([row.block_table for row in rows], int(table_starts[-1])),
        table_starts=table_starts,
        block_size=block_size,
    )


def logit_tokens(rows: Sequence[Row], flat: FlatRows) -> NDArray[np.int64]:
    """[num_logits] packed indices of the tokens whose logits a plan's rows ask for.

    First the last token of each row with samples, then the scored tokens of each row with a score.
    """
    last = flat.row_starts[1:][[bool(row.samples) for row in rows]] - 1
    scored = [
        int(start)
        - row.first_position
        + row.score.first_position
        + np.arange(len(row.score.token_ids))
        for row, start in zip(rows, flat.row_starts, strict=False)
        if row.score is not None
    ]
    return np.concatenate((last, *scored))


def pack(flat: FlatRows, token_ids: NDArray[np.int64], wanted: NDArray[np.int64]) -> PackedBatch:
    """The batch of a checked plan.

    Args:
        flat: the rows, each table covering its row's positions.
        token_ids: [num_tokens], PREVIOUS resolved.
        wanted: [num_logits] packed indices of the tokens whose logits are wanted.
    """
    lengths = flat.context_lengths
    needed = (-(-lengths // flat.block_size)).tolist()
    tables = np.zeros((len(needed), max(needed, default=0)), np.int32)
    for table, start, count in zip(tables, flat.table_starts.tolist(), needed, strict=False):
        table[:count] = flat.blocks[start : start + count]
    return PackedBatch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(flat.positions.astype(np.int32)),
        slots=torch.from_numpy(flat.slots),
        row_starts=torch.from_numpy(flat.row_starts.astype(np.int32)),
        context_lengths=torch.from_numpy(lengths.astype(np.int32)),
        block_tables=torch.from_numpy(tables),
        logit_tokens=torch.from_numpy(wanted),
    )


def moved(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch, on a device."""
    return PackedBatch(
        **{field.name: getattr(batch, field.name).to(device) for field in fields(PackedBatch)}
    )


def _starts(lengths: list[int]) -> NDArray[np.int64]:
    return np.array(list(accumulate(lengths, initial=0)), np.int64)


def _joined(parts: list[tuple[int, ...]], count: int) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(parts), np.int64, count)
