"""Decode attention: bytes of keys and values a second, by tile, layout, dtype, batch and context.

Through whole pools of as many layers as there is room for, one layer after the other, as a step
does: no cache of the GPU holds any of it the next time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.interface import PoolSpec
from kernels.triton_gpu.attention import DeviceWork, Scores, attend
from kernels.triton_gpu.backend import E4M3, TritonKernels
from kernels.triton_gpu.blocks import KEYS, VALUES, Layout, layer_of
from kernels.triton_gpu.tiles import Tile, decode_tile
from kernels.triton_gpu.work import SPLIT_TOKENS, step_work
from ops.gpu.ceilings import COPY
from ops.gpu.section import Section
from ops.gpu.timing import device_s
from shared.geometry import ModelShape, blocks_in

TARGET_SHARE: Final = 0.8
BLOCK_SIZE: Final = 16
_MOST_LAYERS: Final = 32
_FREE_SHARE: Final = 0.5
_TOLERANCE: Final = 0.02


@dataclass(frozen=True)
class Decode:
    """One measurement."""

    batch: int = 64
    context: int = 1024
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    layout: Layout = Layout.BLOCK_MAJOR

    @property
    def layer_bytes(self) -> int:
        """Of keys and values that one layer's attention reads."""
        vector = self.kv_heads * self.head_dim * self.kv_dtype.itemsize
        return 2 * self.batch * self.context * vector

    @property
    def tile(self) -> Tile:
        """What the back end would take."""
        group = self.heads // self.kv_heads
        return decode_tile(self.head_dim, self.dtype.itemsize, self.kv_dtype.itemsize, group)

    def __str__(self) -> str:
        name = str(self.kv_dtype).removeprefix("torch.")
        return (
            f"{self.batch} x {self.context}, {self.heads}/{self.kv_heads} heads, {name}, "
            f"{self.layout.value}"
        )


def run(section: Section) -> None:
    """First what a promise was made about, then layouts and tiles, then other shapes."""
    llama = Decode(batch=2, context=40, heads=4, kv_heads=2, head_dim=16) if section.is_dry else (
        Decode()
    )  # fmt: skip
    for layout in Layout:
        some = replace(llama, layout=layout)
        if not section.has_time(str(some)):
            continue
        with section.guarded(str(some)), _Pool(section, some) as pool:
            rate = _told(section, pool, some, some.tile)
            if layout is Layout.BLOCK_MAJOR:
                _judge(section, rate, some)
            for tile in _tiles(some, is_dry=section.is_dry):
                if section.has_time(f"{some}, {_words(tile)}"):
                    with section.tried(f"{some}, {_words(tile)}"):
                        _told(section, pool, some, tile)
    for some in _others(llama):
        if section.has_time(str(some)):
            with section.guarded(str(some)), _Pool(section, some) as pool:
                _told(section, pool, some, some.tile)


def _judge(section: Section, rate: float, some: Decode) -> None:
    if ceiling := section.ceilings.get(COPY):
        section.target(
            f"decode attention, {some}, of {COPY}", 100 * rate / ceiling, "%", 100 * TARGET_SHARE,
            is_met=rate >= TARGET_SHARE * ceiling,
        )  # fmt: skip


def _tiles(some: Decode, *, is_dry: bool) -> Iterator[Tile]:
    """Others than the back end's; each is compiled anew. The layouts that are no default: few."""
    rows = some.tile.rows
    wishes = [(32, 4, 2), (128, 4, 2), (64, 2, 2), (64, 8, 2), (64, 4, 3), (32, 2, 3), (128, 8, 3)]
    if is_dry or some.layout is not Layout.BLOCK_MAJOR:
        wishes = wishes[:2]
    for keys, warps, stages in wishes:
        tile = Tile(rows, keys, warps, stages)
        if tile != some.tile and SPLIT_TOKENS % keys == 0:
            yield tile


def _others(llama: Decode) -> list[Decode]:
    """Less and more of everything, fewer key-value heads, 8 bits."""
    grouped = replace(llama, kv_heads=llama.kv_heads // 4 or 1)
    small = llama.batch < 64
    return [
        grouped,
        replace(llama, dtype=torch.float16, kv_dtype=E4M3),
        *([] if small else [replace(llama, batch=1), replace(llama, batch=16)]),
        *(
            []
            if small
            else [replace(grouped, batch=256), replace(grouped, batch=4, context=32_768)]
        ),
    ]


class _Pool:
    """A pool full of random numbers, and the arguments of attention over it; freed at the end."""

    def __init__(self, section: Section, some: Decode) -> None:
        blocks = some.batch * blocks_in(some.context, BLOCK_SIZE)
        layers = 2 if section.device.type == "cpu" else _layers(section, some)
        shape = ModelShape(layers, some.heads, some.kv_heads, some.head_dim, 64, 100, 4096)
        kernels = TritonKernels(some.dtype, section.gpu, some.layout)
        spec = PoolSpec(shape, blocks, BLOCK_SIZE, some.kv_dtype, section.device)
        self.pool = _filled(kernels.allocate_pool(spec))
        by_bits = some.kv_dtype == E4M3 and not section.gpu.has_e4m3
        self.readable = self.pool.view(torch.uint8) if by_bits else self.pool
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
        self.tables = order.int().view(some.batch, -1).to(section.device)
        random = torch.Generator(section.device).manual_seed(0)
        self.queries = torch.randn(
            some.batch, some.heads, some.head_dim, generator=random, device=section.device
        ).to(some.dtype)
        self.out = torch.empty_like(self.queries)
        self.num_layers = layers
        self.first: Tensor | None = None
        """What the first tile answered, which every other has to answer too."""

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *_: object) -> None:
        del self.pool, self.readable
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _layers(section: Section, some: Decode) -> int:
    free, _ = torch.cuda.mem_get_info(section.device)
    return max(1, min(_MOST_LAYERS, int(free * _FREE_SHARE / some.layer_bytes)))


def _filled(pool: Tensor) -> Tensor:
    """Numbers around 1, in any dtype that has no random ones of its own."""
    if pool.dtype == E4M3:
        pool.view(torch.uint8).random_(0x30, 0x40)
    else:
        pool.normal_()
    return pool


def launches_over(section: Section, some: Decode) -> Callable[[int], None]:
    """A function that attends in a layer of a new pool, by the back end's tile."""
    return _launches(_Pool(section, some), some, some.tile)


def _launches(pool: _Pool, some: Decode, tile: Tile) -> Callable[[int], None]:
    """A function that attends in a layer; the work is on the device already."""
    work = step_work(
        np.arange(some.batch + 1).tolist(), [some.context] * some.batch, 0,
        tile_tokens=16, decode_keys=tile.keys, prefill_keys=tile.keys,
    ).decode  # fmt: skip
    there = DeviceWork.upload(work, tile, some.heads, some.head_dim, pool.queries.device)
    scores = Scores(some.head_dim**-0.5)

    def in_layer(i: int) -> None:
        layer = i % pool.num_layers
        keys, values = (layer_of(pool.readable, layer, part) for part in (KEYS, VALUES))
        attend(pool.out, pool.queries, keys, values, pool.tables, there, scores)

    return in_layer


def _told(section: Section, pool: _Pool, some: Decode, tile: Tile) -> float:
    """Measure and tell. Returns: GB/s."""
    in_layer = _launches(pool, some, tile)
    in_layer(0)
    what = f"{some}, {_words(tile)}"
    if pool.first is None:
        pool.first = pool.out.clone()
    difference = float((pool.out.double() - pool.first.double()).abs().max())
    if not difference < _TOLERANCE:
        section.fault(what, f"answers differ by {difference:.3g} from the first tile's")
    each_s = device_s(section.device, in_layer, pool.num_layers)
    rate = some.layer_bytes / each_s / 1e9
    section.row(
        what, rate, "GB/s", section.of_ceiling(rate, COPY), microseconds=1e6 * each_s,
        num_layers=pool.num_layers,
    )  # fmt: skip
    return rate


def _words(tile: Tile) -> str:
    return f"{tile.keys} keys, {tile.warps} warps, {tile.stages} stages"
