"""`Kernels` for a GPU. Attention, cache writes, copies and draws are Triton; the rest is torch's.

Nothing here asks which GPU it is but the choice of tiles, and whether the hardware knows e4m3.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.interface import (
    DecoderStep,
    DecoderWeights,
    Linear,
    PackedBatch,
    PoolSpec,
    Vocabulary,
)
from kernels.reference import ReferenceKernels, rotated
from kernels.triton_gpu import blocks
from kernels.triton_gpu.attention import DeviceWork, Scores, attend
from kernels.triton_gpu.blocks import KEYS, VALUES, Layout, layer_of
from kernels.triton_gpu.step import DeviceBatch, StepLayout
from kernels.triton_gpu.tiles import (
    SHARED_A100,
    SHARED_MI300,
    Tile,
    decode_tile,
    prefill_tile,
)
from kernels.triton_gpu.work import step_work
from shared.geometry import ModelShape

E4M3: Final = torch.float8_e4m3fn
MOST_HEAD_DIM: Final = 256


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the kernels need to know of one.

    Attributes:
        shared_bytes: of shared memory one program may take.
        has_e4m3: converts to and from e4m3fn itself (NVIDIA, 8.9 and later).
    """

    shared_bytes: int = SHARED_A100
    has_e4m3: bool = False

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        """As the driver says."""
        if torch.version.hip:
            return cls(SHARED_MI300, has_e4m3=False)
        properties = torch.cuda.get_device_properties(device)
        shared: int = getattr(properties, "shared_memory_per_block_optin", SHARED_A100)
        return cls(shared, has_e4m3=(properties.major, properties.minor) >= (8, 9))


class TritonKernels:
    """Paged operations as Triton kernels; projections, norms and rotary positions by torch.

    Args:
        dtype: of weights and activations: float16, bfloat16 or float32.
        gpu: what to compile for.
        layout: of pools.
        kv_scales: what e4m3 keys and values are multiplied with when they are read.
    """

    name = "triton"
    has_windows = True

    def __init__(
        self,
        dtype: torch.dtype,
        gpu: Gpu,
        layout: Layout = Layout.BLOCK_MAJOR,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.dtype = dtype
        # No bfloat16 under float16: it rounds numbers near float16's greatest, 65,504, to what is
        # infinite when attention takes them as float16 again, and it is no smaller.
        narrower = (E4M3,) if dtype == torch.float16 else (torch.bfloat16, E4M3)
        self.kv_dtypes = tuple(dict.fromkeys((dtype, *narrower)))
        self._gpu = gpu
        self._layout = layout
        self._kv_scales = kv_scales
        self._plain = ReferenceKernels(dtype)
        self._step: _Step | None = None

    def allocate_pool(self, spec: PoolSpec) -> Tensor:
        """Memory for one pool, not cleared. Raises: ValueError for a dtype not in `kv_dtypes`."""
        return blocks.allocate(self._checked(spec), self._layout, spec.device)

    def allocate_swap_pool(self, spec: PoolSpec) -> Tensor:
        """The same in main memory, block-major; pinned, so that a GPU copies by itself."""
        is_pinned = spec.device.type == "cuda"
        host = torch.device("cpu")
        return blocks.allocate(self._checked(spec), Layout.BLOCK_MAJOR, host, is_pinned=is_pinned)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The weight as it is."""
        return self._plain.pack_linear(weight, bias)

    def pack_vocabulary(self, weight: Tensor) -> Vocabulary:
        """The weight as it is."""
        return self._plain.pack_vocabulary(weight)

    def write_kv(
        self, pool: Tensor, layer: int, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        """Store keys and values [num_tokens, kv_heads, head_dim] at `slots`; < 0: nowhere."""
        keys, values = _rows(keys), _rows(values)
        blocks.write(self._readable(pool), layer, keys, values, slots, self._scales(pool))

    def paged_attention(
        self,
        pool: Tensor,
        layer: int,
        queries: Tensor,
        batch: PackedBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float = 0.0,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """As `Kernels` says; and `soft_cap` and `slopes` are as in `Scores`.

        Raises: ValueError if kv_heads does not divide heads, or head_dim is above 256.
        """
        heads, head_dim = queries.shape[1:]
        if heads % pool.shape[2]:
            raise ValueError(f"{pool.shape[2]} key-value heads do not divide {heads} query heads")
        if head_dim > MOST_HEAD_DIM:
            raise ValueError(f"head_dim {head_dim}: attention has tiles for {MOST_HEAD_DIM}")
        key_scale, value_scale = self._scales(pool)
        queries = _rows(queries)
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        readable = self._readable(pool)
        keys, values = layer_of(readable, layer, KEYS), layer_of(readable, layer, VALUES)
        scores = Scores(scale * key_scale, value_scale, soft_cap, window or 0, slopes)
        works = (
            batch.works[window or 0]
            if isinstance(batch, DeviceBatch)
            else self._works(batch, queries, pool, window or 0)
        )
        for work in works:
            attend(out, queries, keys, values, batch.block_tables, work, scores)
        return out

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        """By torch."""
        return self._plain.add_rms_norm(residual, delta, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """By torch."""
        return self._plain.silu_mul(gate_up)

    def rotate_and_write(
        self, pool: Tensor, layer: int, qkv: Tensor, rotary: Tensor, batch: PackedBatch
    ) -> Tensor:
        """Rotate by torch, write by `write_kv`, return the queries."""
        queries, keys, values = rotated(qkv, rotary, pool.shape[2])
        self.write_kv(pool, layer, keys, values, batch.slots)
        return queries

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks over all layers; between the device and main memory, a swap."""
        if source.device != destination.device:
            blocks.swap(source, destination, pairs)
        else:
            blocks.copy(source, destination, pairs.to(source.device))

    def decoder_step(
        self, shape: ModelShape, weights: DecoderWeights, eps: float, scale: float
    ) -> DecoderStep | None:
        """There is none yet."""
        return None

    def step_layout(
        self, shape: ModelShape, kv_dtype: torch.dtype, windows: Iterable[int | None]
    ) -> StepLayout:
        """How steps of a model are laid out for the device.

        Args:
            kv_dtype: of its pool.
            windows: of its layers, as in `DecoderLayer`.
        """
        group = shape.num_heads // shape.num_kv_heads
        decode, prefill = self._tiles(shape.head_dim, group, self.dtype.itemsize, kv_dtype.itemsize)
        every = tuple(dict.fromkeys(window or 0 for window in windows))
        return StepLayout(shape.num_heads, shape.head_dim, group, decode, prefill, every)

    def _tiles(self, head_dim: int, group: int, bytes_: int, kv_bytes: int) -> tuple[Tile, Tile]:
        """Of decode and of prefill."""
        return (
            decode_tile(head_dim, bytes_, kv_bytes, group),
            prefill_tile(head_dim, bytes_, group, self._gpu.shared_bytes),
        )

    def _checked(self, spec: PoolSpec) -> PoolSpec:
        if spec.dtype not in self.kv_dtypes:
            raise ValueError(f"a pool of {spec.dtype}: these kernels store {self.kv_dtypes}")
        return spec

    def _readable(self, pool: Tensor) -> Tensor:
        """The pool as the kernels of this GPU read it."""
        by_bits = pool.dtype == E4M3 and not self._gpu.has_e4m3
        return pool.view(torch.uint8) if by_bits else pool

    def _scales(self, pool: Tensor) -> tuple[float, float]:
        return self._kv_scales if pool.dtype == E4M3 else (1.0, 1.0)

    def _works(
        self, batch: PackedBatch, queries: Tensor, pool: Tensor, window: int
    ) -> tuple[DeviceWork, ...]:
        """The work of a batch, made once for all layers of a step that share a window."""
        heads, head_dim = queries.shape[1:]
        group = heads // pool.shape[2]
        decode, prefill = self._tiles(head_dim, group, queries.element_size(), pool.element_size())
        key = (heads, head_dim, group, window, decode, prefill)
        if self._step is None or self._step.batch() is not batch:
            self._step = _Step(weakref.ref(batch, self._forget), {})
        if key not in self._step.works:
            work = step_work(
                batch.row_starts.tolist(),
                batch.context_lengths.tolist(),
                window,
                tile_tokens=prefill.rows // group,
                decode_keys=decode.keys,
                prefill_keys=prefill.keys,
            )
            self._step.works[key] = tuple(
                DeviceWork.upload(part, tile, heads, head_dim, queries.device)
                for part, tile in ((work.decode, decode), (work.prefill, prefill))
                if len(part.items)
            )
        return self._step.works[key]

    def _forget(self, batch: "weakref.ref[PackedBatch]") -> None:
        """Nobody has the batch any more: its work goes with it."""
        if self._step is not None and self._step.batch is batch:
            self._step = None


@dataclass(frozen=True, slots=True)
class _Step:
    """The batch at hand, and its work by (heads, head_dim, group, window, tiles)."""

    batch: "weakref.ref[PackedBatch]"
    works: dict[tuple[int, int, int, int, Tile, Tile], tuple[DeviceWork, ...]]


def _rows(x: Tensor) -> Tensor:
    """`x`, its last dimension in one piece, as the kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()
