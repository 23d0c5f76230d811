"""Paged attention: a step's work on the device, and the launches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.triton_gpu.device.attention import attention_kernel, fold_kernel
from kernels.triton_gpu.tiles import Tile, padded
from kernels.triton_gpu.work import WorkList

_FOLDED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A work list and room for its unfinished sums, on the device; serves every layer of a step.

    `items` [n, 8] and `folds` [m, 4] int32, as in work.py; `sums` [num_partials, heads, head_dim]
    and `logs` [num_partials, heads] float32: a split's own answer, and the log2 of its mass.
    """

    items: Tensor
    folds: Tensor
    sums: Tensor
    logs: Tensor
    tile: Tile

    @classmethod
    def upload(
        cls, work: WorkList, tile: Tile, heads: int, head_dim: int, device: torch.device
    ) -> "DeviceWork":
        """Copy a work list there."""
        rows = max(1, work.num_partials)
        return cls(
            items=torch.from_numpy(work.items).to(device),
            folds=torch.from_numpy(work.folds).to(device),
            sums=torch.empty(rows, heads, head_dim, dtype=torch.float32, device=device),
            logs=torch.empty(rows, heads, dtype=torch.float32, device=device),
            tile=tile,
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of a query's product with a key.

    It is multiplied with `scale`; with a `soft_cap` c (0: none) it is c * tanh(it / c); `slopes`
    [heads] float32 (ALiBi) times the distance, 0 or less, is added. A query sees the last
    `window` keys, its own included; 0: all. Values are multiplied with `value_scale`.
    """

    scale: float
    value_scale: float = 1.0
    soft_cap: float = 0.0
    window: int = 0
    slopes: Tensor | None = None


def attend(
    out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    work: DeviceWork,
    scores: Scores,
) -> None:
    """Write the answers of `work` to `out`.

    Args:
        out, queries: [num_tokens, heads, head_dim].
        keys, values: [num_blocks, kv_heads, block_size, head_dim], views of one layer of a pool,
            of equal strides, the last 1; uint8 holds e4m3.
        tables: [num_rows, max_blocks] int32.
    """
    if not len(work.items):
        return
    heads, head_dim = queries.shape[1:]
    kv_heads, block_size = keys.shape[1:3]
    tile = work.tile
    attention_kernel[(len(work.items), kv_heads)](
        out, work.sums, work.logs, queries, keys, values, tables, work.items,
        work.logs if scores.slopes is None else scores.slopes,
        scores.scale, scores.value_scale, scores.soft_cap,
        out.stride(0), out.stride(1), queries.stride(0), queries.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), tables.stride(0),
        NUM_HEADS=heads, GROUP=heads // kv_heads, HEAD_DIM=head_dim, HEAD_PAD=padded(head_dim),
        BLOCK_SIZE=block_size, BLOCK_M=tile.rows, BLOCK_N=tile.keys,
        WINDOW=scores.window, ALIBI=scores.slopes is not None, SOFT_CAP=scores.soft_cap > 0,
        SPLIT=len(work.folds) > 0, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    if len(work.folds):
        fold_kernel[(len(work.folds), heads)](
            out, work.sums, work.logs, work.folds, out.stride(0), out.stride(1),
            NUM_HEADS=heads, HEAD_DIM=head_dim, HEAD_PAD=padded(head_dim),
            BLOCK_S=_FOLDED_AT_ONCE, num_warps=4,
        )  # fmt: skip
