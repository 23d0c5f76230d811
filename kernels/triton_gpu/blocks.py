"""Blocks of the pool: what is written into them, and how they are moved.

A pool is `[num_blocks, num_layers, kv_heads, 2, block_size, head_dim]`, keys then values, whatever
its layout in memory: that is in its strides.
"""

from enum import Enum

import torch
from torch import Tensor

from kernels.interface import PoolSpec
from kernels.triton_gpu.device.blocks import copy_kernel, write_kernel
from kernels.triton_gpu.tiles import padded

KEYS, VALUES = 0, 1
_CHUNK_WORDS = 4096
_STAGING_BYTES = 256 * 2**20


class Layout(Enum):
    """What lies next to what in a pool.

    BLOCK_MAJOR: all layers of a block; a block is one piece of memory, swapped in one copy.
    LAYER_MAJOR: all blocks of a layer.
    """

    BLOCK_MAJOR = "block-major"
    LAYER_MAJOR = "layer-major"


def allocate(
    spec: PoolSpec, layout: Layout, device: torch.device, *, is_pinned: bool = False
) -> Tensor:
    """Memory for a pool, not cleared."""
    shape = spec.shape
    block = (shape.num_kv_heads, 2, spec.block_size, shape.head_dim)
    if layout is Layout.BLOCK_MAJOR:
        return torch.empty(
            (spec.num_blocks, shape.num_layers, *block),
            dtype=spec.dtype, device=device, pin_memory=is_pinned,
        )  # fmt: skip
    return torch.empty(
        (shape.num_layers, spec.num_blocks, *block), dtype=spec.dtype, device=device
    ).transpose(0, 1)


def layer_of(pool: Tensor, layer: int, part: int) -> Tensor:
    """Keys or values of a layer: [num_blocks, kv_heads, block_size, head_dim]."""
    return pool[:, layer, :, part]


def write(
    pool: Tensor,
    layer: int,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scales: tuple[float, float],
) -> None:
    """Store keys and values [num_tokens, kv_heads, head_dim] at `slots`; negative ones nowhere.

    Args:
        pool: uint8 holds e4m3.
        scales: what e4m3 keys and values are multiplied with when they are read.
    """
    if not len(slots):
        return
    k, v = layer_of(pool, layer, KEYS), layer_of(pool, layer, VALUES)
    num_tokens, kv_heads, head_dim = keys.shape
    heads_at_once = min(padded(kv_heads), max(1, 2048 // padded(head_dim)))
    write_kernel[(num_tokens, -(-kv_heads // heads_at_once))](
        keys, values, k, v, slots, 1.0 / scales[0], 1.0 / scales[1],
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        k.stride(0), k.stride(1), k.stride(2),
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, HEAD_PAD=padded(head_dim),
        BLOCK_SIZE=pool.shape[4], BLOCK_H=heads_at_once, num_warps=4,
    )  # fmt: skip


def copy(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy blocks over all layers, on the device, in one launch.

    Args:
        source, destination: pools of one block's shape and dtype, of any layouts.
        pairs: [num_copies, 2] int64, (source block, destination block), there; no block is both.
    """
    if not len(pairs):
        return
    to_words, from_words = _words(destination), _words(source)
    num_layers = from_words.shape[1]
    num_words = from_words[0, 0].numel()
    copy_kernel[(len(pairs), num_layers, -(-num_words // _CHUNK_WORDS))](
        to_words, from_words, pairs, num_words,
        to_words.stride(0), to_words.stride(1), from_words.stride(0), from_words.stride(1),
        CHUNK=_CHUNK_WORDS, num_warps=4,
    )  # fmt: skip


def gather(pool: Tensor, blocks: Tensor) -> Tensor:
    """Whole blocks in one piece of memory on the device, [n, *pool.shape[1:]], to be copied out.

    Args:
        blocks: [n] int64, on the device.
    """
    staging = torch.empty((len(blocks), *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
    places = torch.arange(len(blocks), device=pool.device)
    copy(pool, staging, torch.stack((blocks, places), dim=1))
    return staging


def scatter(staging: Tensor, pool: Tensor, blocks: Tensor) -> None:
    """The way back: block i of `staging` to `blocks[i]`."""
    places = torch.arange(len(blocks), device=pool.device)
    copy(staging, pool, torch.stack((places, blocks), dim=1))


def swap(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy blocks between a pool on the device and one in main memory, and wait.

    They cross in one copy of many blocks, gathered before and scattered behind.

    Args:
        pairs: [num_copies, 2] int64, in main memory.
    """
    source, destination = _plain(source), _plain(destination)
    block_bytes = source[0].numel() * source.element_size()
    at_once = max(1, _STAGING_BYTES // block_bytes)
    cross = swap_in if source.device.type == "cpu" else swap_out
    for some in torch.split(pairs, at_once):
        cross(source, destination, some)


def swap_out(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Blocks of the device's pool into main memory, gathered in one piece there."""
    sources, destinations = pairs.unbind(1)
    staging = gather(source, sources.to(source.device)).to(destination.device)
    _plain(destination).index_copy_(0, destinations, _plain(staging))


def swap_in(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """The way back."""
    sources, destinations = pairs.unbind(1)
    staging = source.index_select(0, sources).to(destination.device)
    scatter(staging, destination, destinations.to(destination.device))


def _plain(pool: Tensor) -> Tensor:
    """The same memory in a dtype that torch can index: it cannot write to e4m3 so."""
    return pool.view(torch.uint8) if pool.element_size() == 1 else pool


def _words(pool: Tensor) -> Tensor:
    """The same memory as integers, as wide as divide what is in one piece."""
    piece = pool.shape[-1] * pool.element_size()
    return pool.view(torch.int32 if piece % 4 == 0 else torch.uint8)
