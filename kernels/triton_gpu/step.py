"""A step as arrays that the device reads, and what the kernels see of them there.

Block tables lie end to end in one flat array, and an item of work names, in its first column, the
entry where its sequence's begins. So nothing is padded to the longest sequence, and a step of few
blocks is a short copy.

A step is either of its own size, or of a fixed one (`Bounds`), as a CUDA graph needs it: what is
missing are rows that are written nowhere, attend to nothing, and whose logits mean nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.interface import PackedBatch
from kernels.triton_gpu.attention import DeviceWork
from kernels.triton_gpu.tiles import Tile
from kernels.triton_gpu.work import StepWork, step_work
from shared.errors import InvariantBroken

Array = NDArray[np.int32] | NDArray[np.int64]

_DECODE: Final = "decode"
_PREFILL: Final = "prefill"


@dataclass(frozen=True, slots=True)
class DeviceBatch(PackedBatch):
    """A batch on the device, its attention worked out.

    `block_tables` [num_entries] int32 is flat; `row_starts` and `context_lengths` are empty: what
    they say is in `works`, by window (0: none).
    """

    works: Mapping[int, tuple[DeviceWork, ...]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """A step of this size: `rows` of one new token each, their keys in `items` splits at most.

    With no more items than rows no sequence is split.
    """

    rows: int
    items: int

    @property
    def folds(self) -> int:
        """Sequences in splits, at most."""
        return self.rows if self.items > self.rows else 0


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, packed end to end.

    Attributes:
        token_ids, positions, slots: [num_tokens] int64, as in `PackedBatch`.
        row_starts: [num_rows + 1] int64.
        context_lengths: [num_rows] int64.
        blocks: [num_entries] int64, all tables end to end.
        table_starts: [num_rows + 1] int64, first entry of each row's.
        logit_tokens: [num_logits] int64.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    row_starts: NDArray[np.int64]
    context_lengths: NDArray[np.int64]
    blocks: NDArray[np.int64]
    table_starts: NDArray[np.int64]
    logit_tokens: NDArray[np.int64]

    @classmethod
    def of(cls, batch: PackedBatch) -> "StepRows":
        """A batch in main memory."""
        num_rows, width = batch.block_tables.shape
        return cls(
            token_ids=batch.token_ids.numpy(),
            positions=batch.positions.numpy().astype(np.int64),
            slots=batch.slots.numpy(),
            row_starts=batch.row_starts.numpy().astype(np.int64),
            context_lengths=batch.context_lengths.numpy().astype(np.int64),
            blocks=batch.block_tables.numpy().reshape(-1).astype(np.int64),
            table_starts=np.arange(num_rows + 1) * width,
            logit_tokens=batch.logit_tokens.numpy(),
        )


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A step's arrays, by name, and how many rows of unfinished sums it needs.

    All arrays but the last, "blocks", are of the size that `Bounds` say, if there are any.
    """

    arrays: dict[str, Array]
    num_partials: int


@dataclass(frozen=True, slots=True)
class StepLayout:
    """How the steps of one model are laid out.

    Attributes:
        heads, head_dim: of its queries.
        decode, prefill: tiles of attention.
        group: query heads of a key-value head.
        windows: those of its layers, each once; 0: none.
    """

    heads: int
    head_dim: int
    group: int
    decode: Tile
    prefill: Tile
    windows: tuple[int, ...]

    def lay_out(self, rows: StepRows, bounds: Bounds | None = None) -> "LaidOut | None":
        """What goes to the device; None if it is more than `bounds`."""
        num_rows, num_tokens = len(rows.context_lengths), len(rows.token_ids)
        num_logits = len(rows.logit_tokens)
        if bounds is not None and (
            max(num_rows, num_logits) > bounds.rows or num_tokens != num_rows
        ):
            return None
        size = bounds.rows if bounds else num_tokens
        arrays: dict[str, Array] = {
            "token_ids": _filled(rows.token_ids, size, 0),
            "positions": _filled(rows.positions.astype(np.int32), size, 0),
            "slots": _filled(rows.slots, size, -1),
            "logit_tokens": _filled(rows.logit_tokens, bounds.rows if bounds else num_logits, 0),
        }
        num_partials = 0
        for window in self.windows:
            work = self._work(rows, window)
            num_items, num_folds = len(work.decode.items), len(work.decode.folds)
            if bounds is not None:
                if num_items > bounds.items or num_folds > bounds.folds:
                    return None
                num_items, num_folds = bounds.items, bounds.folds
            arrays[f"{_DECODE}_items_{window}"] = _filled(work.decode.items, num_items, 0)
            arrays[f"{_DECODE}_folds_{window}"] = _filled(work.decode.folds, num_folds, 0)
            arrays[f"{_PREFILL}_items_{window}"] = work.prefill.items
            arrays[f"{_PREFILL}_folds_{window}"] = work.prefill.folds
            num_partials = max(num_partials, work.decode.num_partials)
        arrays["blocks"] = rows.blocks.astype(np.int32)
        return LaidOut(arrays, bounds.items if bounds else num_partials)

    def on(self, device: torch.device, rows: StepRows) -> DeviceBatch:
        """A step of its own size, copied array by array; with sums of its own."""
        laid = self.lay_out(rows)
        if laid is None:
            raise InvariantBroken("a step of its own size does not fit into it")
        there = {name: torch.from_numpy(array).to(device) for name, array in laid.arrays.items()}
        return self.batch(there, Sums.of(self, laid.num_partials, device))

    def _work(self, rows: StepRows, window: int) -> StepWork:
        """The work lists, their sequences named by where their tables begin."""
        work = step_work(
            rows.row_starts, rows.context_lengths, window,
            self.prefill.rows // self.group, self.decode.keys, self.prefill.keys,
        )  # fmt: skip
        for items in (work.decode.items, work.prefill.items):
            items[:, 0] = rows.table_starts[items[:, 0]]
        return work

    def batch(self, there: Mapping[str, Tensor], sums: "Sums") -> DeviceBatch:
        """The arrays, on the device, as a batch; `sums` has room for the step's partials."""
        device = there["token_ids"].device
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        return DeviceBatch(
            token_ids=there["token_ids"],
            positions=there["positions"],
            slots=there["slots"],
            row_starts=nothing,
            context_lengths=nothing,
            block_tables=there["blocks"],
            logit_tokens=there["logit_tokens"],
            works={
                window: tuple(
                    DeviceWork(
                        there[f"{kind}_items_{window}"], there[f"{kind}_folds_{window}"],
                        sums.sums, sums.logs, tile,
                    )
                    for kind, tile in ((_DECODE, self.decode), (_PREFILL, self.prefill))
                    if len(there[f"{kind}_items_{window}"])
                )
                for window in self.windows
            },
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sums:
    """Room for unfinished sums, as in `DeviceWork`; serves one layer after the other."""

    sums: Tensor
    logs: Tensor

    @classmethod
    def of(cls, layout: StepLayout, num_partials: int, device: torch.device) -> "Sums":
        """Room for so many."""
        shape = (max(1, num_partials), layout.heads)
        return cls(
            torch.empty(*shape, layout.head_dim, dtype=torch.float32, device=device),
            torch.empty(*shape, dtype=torch.float32, device=device),
        )


def _filled(array: Array, size: int, filling: int) -> Array:
    """`array` with rows of `filling` behind, `size` in all."""
    missing = size - len(array)
    if not missing:
        return array
    rest = np.full((missing, *array.shape[1:]), filling, array.dtype)
    return np.concatenate((array, rest))
