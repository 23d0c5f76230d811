"""The CPU back end: attention and products in machine code.

Its pool is `[num_blocks, num_layers, kv_heads, 2, block_size * head_dim]`: a (block, layer, head)
tile holds keys token-minor (`[head_dim][block_size]`: one load fetches one number of 16 tokens),
then values (`[block_size][head_dim]`), side by side in memory, on huge pages where the system has
them.
"""

import ctypes

import torch
from torch import Tensor

from kernels.cpu import arguments as words
from kernels.cpu.checks import check_copy
from kernels.cpu.code import bodies, kind_of
from kernels.cpu.linear import pack_linear, pack_vocabulary
from kernels.cpu.memory import advise_huge_pages
from kernels.cpu.plan import AttentionPlan
from kernels.cpu.threads import num_threads, the_team
from kernels.interface import (
    DecoderStep,
    DecoderWeights,
    Linear,
    PackedBatch,
    PoolSpec,
    Vocabulary,
)
from shared.geometry import ModelShape

KEYS, VALUES = 0, 1
PARALLEL_ELEMENTS = 16_384
"""Numbers below which a small step is done before other threads would have woken up."""

PIECE_BYTES = 2**16
"""Bytes of blocks that a thread copies at a time: enough to be worth a turn at the counter."""


class CpuKernels:
    """bfloat16 or float32 on a CPU."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.kv_dtypes: tuple[torch.dtype, ...] = (dtype,)
        self.has_windows = False
        self._bodies = bodies(kind_of(dtype))
        self._team = the_team()
        self._copy_body = bodies("team")["copy"]
        self._plan = AttentionPlan(self._bodies["list_work"])
        self._norm = (ctypes.c_int64 * words.NORM_WORDS)()
        self._silu = (ctypes.c_int64 * words.SILU_WORDS)()
        self._rotate = (ctypes.c_int64 * words.ROTATE_WORDS)()
        self._copy = (ctypes.c_int64 * words.COPY_WORDS)()

    def allocate_pool(self, spec: PoolSpec) -> Tensor:
        """Memory for one pool, not touched; one vector longer, for the last tile's loads."""
        shape = (spec.num_blocks, spec.shape.num_layers, spec.shape.num_kv_heads, 2)
        count = torch.Size(shape).numel() * spec.block_size * spec.shape.head_dim
        memory = torch.empty(count + words.WIDTH, dtype=spec.dtype)
        advise_huge_pages(memory)
        return memory[:count].view(*shape, spec.block_size * spec.shape.head_dim)

    def allocate_swap_pool(self, spec: PoolSpec) -> Tensor:
        """Another pool: all is main memory."""
        return self.allocate_pool(spec)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The weight in the fastest form that is right here."""
        return pack_linear(weight, bias)

    def pack_vocabulary(self, weight: Tensor) -> Vocabulary:
        """The weight in a form that rows can be picked from."""
        return pack_vocabulary(weight)

    def write_kv(
        self, pool: Tensor, layer: int, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        """Store keys and values at `slots`, all at once."""
        head_dim = keys.shape[2]
        block_size = pool.shape[4] // head_dim
        blocks, offsets = slots // block_size, slots % block_size
        num_blocks, kv_heads = pool.shape[0], pool.shape[2]
        key_tiles = pool[:, layer, :, KEYS].view(num_blocks, kv_heads, head_dim, block_size)
        key_tiles[blocks, :, :, offsets] = keys
        value_tiles = pool[:, layer, :, VALUES].view(num_blocks, kv_heads, block_size, head_dim)
        value_tiles[blocks, :, offsets] = values

    def paged_attention(
        self,
        pool: Tensor,
        layer: int,
        queries: Tensor,
        batch: PackedBatch,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Attend through the block table, threads taking rows and heads as they come free.

        Raises: ValueError for a window: there is none here, `has_windows` is false.
        """
        if window is not None:
            raise ValueError(f"a window of {window} keys: this back end attends to all")
        queries = queries.contiguous()
        attended = torch.empty_like(queries)
        block = self._plan.arguments_for(pool, queries, batch, scale)
        block[words.NEXT] = block[words.WORKER] = 0
        block[words.POOL] = pool.data_ptr() + layer * pool.stride(1) * pool.itemsize
        block[words.QUERIES] = queries.data_ptr()
        block[words.OUT] = attended.data_ptr()
        self._team.run(self._bodies["attend"], ctypes.addressof(block), self._plan.threads)
        return attended

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        """Add and norm in one pass."""
        normed = torch.empty(residual.shape, dtype=self.dtype)
        block = self._norm
        block[words.RESIDUAL] = residual.data_ptr()
        block[words.DELTA] = 0 if delta is None else delta.data_ptr()
        block[words.WEIGHT] = weight.data_ptr()
        block[words.NORMED] = normed.data_ptr()
        block[words.SIZE] = residual.shape[1]
        block[words.EPS] = words.float_bits(eps)
        self._share("norm", block, *residual.shape)
        return normed

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Gate and activation in one pass."""
        num_tokens, width = gate_up.shape
        activated = torch.empty((num_tokens, width // 2), dtype=self.dtype)
        block = self._silu
        block[words.GATE_UP] = gate_up.data_ptr()
        block[words.ACTIVATED] = activated.data_ptr()
        block[words.HALF] = width // 2
        self._share("silu", block, num_tokens, width)
        return activated

    def rotate_and_write(
        self, pool: Tensor, layer: int, qkv: Tensor, rotary: Tensor, batch: PackedBatch
    ) -> Tensor:
        """Rotate and store token by token."""
        num_tokens, width = qkv.shape
        head_dim, kv_heads = rotary.shape[1], pool.shape[2]
        heads = width // head_dim - 2 * kv_heads
        queries = torch.empty((num_tokens, heads, head_dim), dtype=self.dtype)
        block = self._rotate
        block[words.QKV] = qkv.data_ptr()
        block[words.ROTARY] = rotary.data_ptr()
        block[words.R_SLOTS] = batch.slots.data_ptr()
        block[words.R_QUERIES] = queries.data_ptr()
        block[words.R_POOL] = pool.data_ptr() + layer * pool.stride(1) * pool.itemsize
        block[words.R_HEADS] = heads
        block[words.R_KV_HEADS] = kv_heads
        block[words.R_HEAD_DIM] = head_dim
        block[words.R_BLOCK_SIZE] = pool.shape[4] // head_dim
        block[words.R_BLOCK_BYTES] = pool.stride(0) * pool.itemsize
        block[words.R_HEAD_BYTES] = pool.stride(2) * pool.itemsize
        self._share("rotate", block, num_tokens, width)
        return queries

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks, each one run of memory; threads take pieces as they come free.

        Raises: ValueError if the tensors are not what the compiled code reads.
        """
        if not len(pairs):
            return
        check_copy(source, destination, pairs)
        block_bytes = source.stride(0) * source.itemsize
        pieces = -(-block_bytes // PIECE_BYTES)
        block = self._copy
        block[words.NEXT] = 0
        block[words.COUNT] = len(pairs) * pieces
        block[words.RUN] = max(1, PIECE_BYTES // block_bytes)
        block[words.C_SOURCE] = source.data_ptr()
        block[words.C_DESTINATION] = destination.data_ptr()
        block[words.C_PAIRS] = pairs.data_ptr()
        block[words.C_BLOCK_BYTES] = block_bytes
        block[words.C_PIECES] = pieces
        block[words.C_PIECE_BYTES] = PIECE_BYTES
        threads = num_threads() if len(pairs) * block_bytes > PIECE_BYTES else 1
        self._team.run(self._copy_body, ctypes.addressof(block), threads)

    def decoder_step(
        self, shape: ModelShape, weights: DecoderWeights, eps: float, scale: float
    ) -> DecoderStep | None:
        """There is none."""
        return None

    def _share(self, name: str, block: ctypes.Array[ctypes.c_int64], rows: int, width: int) -> None:
        """Run a row-wise body over `rows` rows, on several threads where that pays."""
        block[words.NEXT] = 0
        block[words.COUNT] = rows
        block[words.RUN] = max(1, PARALLEL_ELEMENTS // 4 // width)
        body = self._bodies[name]
        if rows * width < PARALLEL_ELEMENTS:
            body.run_here(ctypes.addressof(block))
        else:
            self._team.run(body, ctypes.addressof(block), num_threads())
