"""Prefill attention: operations a second, against torch's scaled_dot_product_attention."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.interface import PoolSpec
from kernels.triton_gpu.attention import DeviceWork, Scores, attend
from kernels.triton_gpu.backend import TritonKernels
from kernels.triton_gpu.blocks import KEYS, VALUES, layer_of
from kernels.triton_gpu.tiles import Tile, prefill_tile
from kernels.triton_gpu.work import step_work
from ops.gpu.ceilings import PRODUCT
from ops.gpu.section import Section
from ops.gpu.timing import device_s
from shared.geometry import ModelShape, blocks_in

BLOCK_SIZE: Final = 16
_TOLERANCE: Final = 0.06
"""Both round their weights and their answers, of up to 4 or so, to bfloat16."""


@dataclass(frozen=True)
class Prefill:
    """One measurement: a whole prompt of one sequence."""

    length: int = 2048
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128

    @property
    def operations(self) -> float:
        """Two products, of which causality leaves half; a multiplication and an addition each."""
        return 2.0 * self.heads * self.head_dim * self.length * (self.length + 1)

    def __str__(self) -> str:
        return f"{self.length} tokens, {self.heads}/{self.kv_heads} heads"


def run(section: Section) -> None:
    """Ours and torch's by length; then tiles."""
    for some in _shapes(is_dry=section.is_dry):
        if section.has_time(str(some)):
            with section.guarded(str(some)):
                _compare(section, some)


def _shapes(*, is_dry: bool) -> Iterator[Prefill]:
    if is_dry:
        yield Prefill(40, 4, 2, 16)
        return
    for length in (2048, 512, 8192):
        some = Prefill(length)
        yield from (some, replace(some, kv_heads=8))


def _compare(section: Section, some: Prefill) -> None:
    random = torch.Generator(section.device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        shape = (some.length, heads, some.head_dim)
        return torch.randn(*shape, generator=random, device=section.device).bfloat16()

    queries, keys, values = normal(some.heads), normal(some.kv_heads), normal(some.kv_heads)
    q, k, v = (heads.transpose(0, 1).contiguous()[None] for heads in (queries, keys, values))

    def theirs() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    wanted = theirs()[0].transpose(0, 1)
    each_s = device_s(section.device, lambda i: theirs())
    their_rate = some.operations / each_s / 1e12
    note = section.of_ceiling(their_rate, PRODUCT)
    section.row(f"{some}, torch", their_rate, "TFLOP/s", note)
    chosen = _chosen(section, some)
    for tile in (chosen, *_others(some, chosen)):
        what = f"{some}, {tile.rows} x {tile.keys}, {tile.warps} warps, {tile.stages} stages"
        if not section.has_time(what):
            continue
        with section.guarded(what) if tile == chosen else section.tried(what):
            out, each_s = _ours(section, some, tile, (queries, keys, values))
            error = float((out.double() - wanted.double()).abs().max())
            if not error < _TOLERANCE:
                section.fault(what, f"differs from torch's by {error:.3g}")
            rate = some.operations / each_s / 1e12
            section.row(
                what, rate, "TFLOP/s", f"{rate / their_rate:.2f} of torch's",
                microseconds=1e6 * each_s,
            )  # fmt: skip


def _chosen(section: Section, some: Prefill) -> Tile:
    """The back end's."""
    group = some.heads // some.kv_heads
    return prefill_tile(some.head_dim, 2, group, section.gpu.shared_bytes)


def _others(some: Prefill, chosen: Tile) -> Iterator[Tile]:
    """Some for one shape, each compiled anew; a GPU may have no room for them."""
    if some == Prefill():
        for rows, keys, warps, stages in (
            (128, 64, 8, 2), (64, 64, 4, 3), (64, 32, 4, 2), (128, 128, 8, 2), (128, 32, 8, 2),
        ):  # fmt: skip
            if Tile(rows, keys, warps, stages) != chosen:
                yield Tile(rows, keys, warps, stages)


def _ours(
    section: Section, some: Prefill, tile: Tile, qkv: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, float]:
    """The answer, and seconds."""
    queries, keys, values = qkv
    num_blocks = blocks_in(some.length, BLOCK_SIZE)
    shape = ModelShape(1, some.heads, some.kv_heads, some.head_dim, 64, 100, 4096)
    kernels = TritonKernels(torch.bfloat16, section.gpu)
    spec = PoolSpec(shape, num_blocks, BLOCK_SIZE, torch.bfloat16, section.device)
    pool = kernels.allocate_pool(spec)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    places = torch.arange(some.length)
    slots = order[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    kernels.write_kv(pool, 0, keys, values, slots.to(section.device))
    work = step_work(
        [0, some.length], [some.length], 0,
        tile_tokens=tile.rows // (some.heads // some.kv_heads),
        decode_keys=tile.keys, prefill_keys=tile.keys,
    ).prefill  # fmt: skip
    there = DeviceWork.upload(work, tile, some.heads, some.head_dim, section.device)
    tables, out = order.int()[None].to(section.device), torch.empty_like(queries)
    k, v = (layer_of(pool, 0, part) for part in (KEYS, VALUES))
    scores = Scores(some.head_dim**-0.5)
    each_s = device_s(section.device, lambda i: attend(out, queries, k, v, tables, there, scores))
    return out, each_s
