"""Blocks: written by slot, copied within a pool, gathered, scattered, swapped out and in again."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import PoolSpec
from kernels.reference import ReferenceKernels
from kernels.triton_gpu import blocks
from kernels.triton_gpu.backend import E4M3, TritonKernels
from kernels.triton_gpu.blocks import Layout
from ops.gpu.ragged import kept
from ops.gpu.section import Section
from shared.geometry import ModelShape

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")


def writes(section: Section, what: str) -> None:
    """Where the slots say and nowhere else, in every dtype and layout."""
    wishes = [(HALF, HALF, 64), (BRAIN, BRAIN, 80), (FULL, FULL, 40), (BRAIN, E4M3, 128)]
    cases = [(*wish, layout) for wish in wishes for layout in Layout]
    for seed, (dtype, kv_dtype, head_dim, layout) in enumerate(cases):
        name = f"{what}: {kv_dtype}, {layout.value}"
        heads = torch.randn(6, 8, head_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
        with section.guarded(name):
            if not _is_written(section, heads, kv_dtype, layout):
                section.fault(name, "not what the reference writes")
    section.row(what, len(cases), "cases", "exact")


def _is_written(section: Section, heads: Tensor, kv_dtype: torch.dtype, layout: Layout) -> bool:
    """Whether heads [6 tokens, 4 queries + 2 keys + 2 values, head_dim] come to lie right."""
    slots = torch.tensor([5, 16 * 3 + 15, -1, 16 * 11, -7, 4])
    is_kept = slots >= 0
    scales = (0.5, 0.02) if kv_dtype == E4M3 else (1.0, 1.0)
    kernels = TritonKernels(heads.dtype, section.gpu, layout, scales)
    got = _all_nan(kernels.allocate_pool(_spec(kv_dtype, section.device, heads.shape[2])))
    wanted = _all_nan(kernels.allocate_pool(_spec(kv_dtype, CPU, heads.shape[2])))
    there = heads.to(section.device)
    kernels.write_kv(got, 1, there[:, 4:6], there[:, 6:], slots.to(section.device))
    keys = kept(heads[is_kept, 4:6], kv_dtype, scales[0])
    values = kept(heads[is_kept, 6:], kv_dtype, scales[1])
    ReferenceKernels(kv_dtype).write_kv(wanted, 1, keys, values, slots[is_kept])
    return torch.equal(got.cpu().float().nan_to_num(777), wanted.float().nan_to_num(777))


def _spec(dtype: torch.dtype, device: torch.device, head_dim: int = 64) -> PoolSpec:
    return PoolSpec(ModelShape(3, 4, 2, head_dim, 64, 100, 4096), 12, 16, dtype, device)


def _all_nan(pool: Tensor) -> Tensor:
    """All ones are NaN in any float."""
    pool.view(torch.uint8).fill_(0xFF)
    return pool


@dataclass(frozen=True)
class _Move:
    """Blocks `sources` become blocks `targets` by `carry_out`."""

    sources: list[int]
    targets: list[int]
    carry_out: Callable[[], None]


def copies(section: Section, what: str) -> None:
    """Copy-on-write, gather and scatter, and out to main memory and in again: all bits."""
    count = 0
    for dtype in (BRAIN, E4M3):
        for layout in Layout:
            kernels = TritonKernels(BRAIN, section.gpu, layout)
            random = torch.Generator().manual_seed(1)
            before = torch.randn(12, 3, 2, 2, 16, 64, generator=random).to(dtype)
            pool = kernels.allocate_pool(_spec(dtype, section.device))
            aside = kernels.allocate_swap_pool(_spec(dtype, section.device))
            for name, move in _moves(kernels, pool, aside).items():
                wanted = before.clone()
                wanted[move.targets] = before[move.sources]
                pool.copy_(before)
                with section.guarded(f"{what}: {name}"):
                    move.carry_out()
                    if not torch.equal(_bits(pool.cpu()), _bits(wanted)):
                        section.fault(f"{what}: {name}", f"other bits; {dtype}, {layout.value}")
                count += 1
    section.row(what, count, "cases", "exact")


def _moves(kernels: TritonKernels, pool: Tensor, aside: Tensor) -> dict[str, _Move]:
    some, others, between = [7, 2, 10], [0, 4, 11], [1, 0, 9]

    def move(source: Tensor, target: Tensor, of: list[int], to: list[int]) -> None:
        kernels.copy_blocks(source, target, torch.tensor([of, to]).T.contiguous())

    def out_and_in() -> None:
        move(pool, aside, some, between)
        move(aside, pool, between, others)

    def gather_and_scatter() -> None:
        at = torch.tensor([some, others], device=pool.device)
        blocks.scatter(blocks.gather(pool, at[0]), pool, at[1])

    ones, twos = [1, 1, 3], [5, 6, 9]
    return {
        "copy-on-write": _Move(ones, twos, lambda: move(pool, pool, ones, twos)),
        "gather and scatter": _Move(some, others, gather_and_scatter),
        "out and in again": _Move(some, others, out_and_in),
    }


def _bits(pool: Tensor) -> Tensor:
    return pool.contiguous().view(torch.uint8)
