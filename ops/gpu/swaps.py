"""Blocks across the bus: one copy of many, gathered before, against a copy for each; and forks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from kernels.interface import PoolSpec
from kernels.triton_gpu import blocks
from kernels.triton_gpu.backend import TritonKernels
from kernels.triton_gpu.blocks import Layout
from ops.gpu.ceilings import COPY, FROM_DEVICE, TO_DEVICE
from ops.gpu.decoder import LLAMA_2_7B, TINY
from ops.gpu.section import Section
from ops.gpu.timing import best_s, device_s
from shared.geometry import ModelShape

BLOCK_SIZE: Final = 16
_MOVED_BYTES: Final = 512 * 2**20
_REPEATED: Final = 3


@dataclass(frozen=True)
class Bench:
    """A pool, one in main memory, and which blocks cross: `there[i]` and `here[i]` are a pair."""

    kernels: TritonKernels
    pool: Tensor
    aside: Tensor
    there: Tensor
    here: Tensor

    @property
    def moved_bytes(self) -> int:
        """Of all blocks that cross."""
        return len(self.there) * self.pool[0].numel() * self.pool.element_size()


def run(section: Section) -> None:
    """Blocks of a model with a head for every key and of one with grouped heads; both layouts."""
    llama = (TINY if section.is_dry else LLAMA_2_7B).shape
    grouped = replace(llama, num_kv_heads=max(1, llama.num_kv_heads // 4))
    for shape in (llama,) if section.is_dry else (llama, grouped):
        for layout in Layout:
            megabytes = shape.bytes_per_token(2) * BLOCK_SIZE / 1e6
            what = f"blocks of {megabytes:.2g} MB, {layout.value}"
            if section.has_time(what):
                with section.guarded(what):
                    bench = _bench(section, shape, layout)
                    _cross(section, what, bench)
                    _fork(section, what, bench)


def _bench(section: Section, shape: ModelShape, layout: Layout) -> Bench:
    kernels = TritonKernels(torch.bfloat16, section.gpu, layout)
    block_bytes = shape.bytes_per_token(2) * BLOCK_SIZE
    count = 2 if section.is_dry else max(2, _MOVED_BYTES // block_bytes)
    spec = PoolSpec(shape, 2 * count, BLOCK_SIZE, torch.bfloat16, section.device)
    pool, aside = kernels.allocate_pool(spec), kernels.allocate_swap_pool(spec)
    pool.normal_()
    aside.zero_()
    random = torch.Generator().manual_seed(0)
    there = torch.randperm(2 * count, generator=random)[:count]
    here = torch.randperm(2 * count, generator=random)[:count]
    return Bench(kernels, pool, aside, there, here)


def _cross(section: Section, what: str, bench: Bench) -> None:
    for name, (out, back) in _ways(bench).items():
        for call, direction, ceiling in ((out, "out", FROM_DEVICE), (back, "in", TO_DEVICE)):
            call_s = best_s(section.device, call, 1 if section.is_dry else _REPEATED)
            rate = bench.moved_bytes / call_s / 1e9
            section.row(
                f"{what}, {direction}, {name}", rate, "GB/s", section.of_ceiling(rate, ceiling)
            )
        before = bench.pool.clone()
        bench.aside.zero_()
        out()
        _wait(bench.pool.device)
        if not torch.equal(bench.aside[bench.here], before[bench.there.to(before.device)].cpu()):
            section.fault(f"{what}, {name}", "not the pool's blocks in main memory after out")
        bench.pool[bench.there.to(bench.pool.device)] = 0
        back()
        _wait(bench.pool.device)
        if not torch.equal(bench.pool, before):
            section.fault(f"{what}, {name}", "not the same blocks after out and in")


def _ways(bench: Bench) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By name, out and in. All of them leave the same blocks in the same places.

    The staging memory of the second is pinned, that of the back end's is not.
    """
    pool, aside = bench.pool, bench.aside
    pairs = torch.stack((bench.there, bench.here), dim=1)
    one_by_one = list(zip(bench.there.tolist(), bench.here.tolist(), strict=True))
    there = bench.there.to(pool.device)
    staged = torch.empty(
        (len(there), *pool.shape[1:]), dtype=pool.dtype, pin_memory=pool.device.type == "cuda"
    )

    def one_copy_out() -> None:
        staged.copy_(blocks.gather(pool, there), non_blocking=True)
        _wait(pool.device)  # what is not there yet cannot be scattered
        aside.index_copy_(0, bench.here, staged)

    def one_copy_in() -> None:
        torch.index_select(aside, 0, bench.here, out=staged)
        blocks.scatter(staged.to(pool.device, non_blocking=True), pool, there)
        _wait(pool.device)  # before `staged` is written again

    def each_out() -> None:
        for block, place in one_by_one:
            aside[place].copy_(pool[block], non_blocking=True)

    def each_in() -> None:
        for block, place in one_by_one:
            pool[block].copy_(aside[place], non_blocking=True)

    copy_blocks = bench.kernels.copy_blocks
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "staged by the back end": (
            lambda: copy_blocks(pool, aside, pairs),
            lambda: copy_blocks(aside, pool, pairs.flip(1)),
        ),
        "one staging copy": (one_copy_out, one_copy_in),
    }
    if pool.is_contiguous():  # else a block is in pieces, and the runner refuses the pool
        ways["a copy a block, as the runner"] = (each_out, each_in)
    return ways


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _fork(section: Section, what: str, bench: Bench) -> None:
    """Copy-on-write within the pool."""
    free = torch.tensor(sorted(set(range(len(bench.pool))) - set(bench.there.tolist())))
    pairs = torch.stack((bench.there, free), dim=1).to(bench.pool.device)
    call_s = device_s(section.device, lambda i: blocks.copy(bench.pool, bench.pool, pairs))
    rate = 2 * bench.moved_bytes / call_s / 1e9
    section.row(f"{what}, copy-on-write", rate, "GB/s", section.of_ceiling(rate, COPY))
