"""What attention works through in one step: items, scratch memory and the argument block."""

import ctypes

import torch
from torch import Tensor

from kernels.cpu import arguments as words
from kernels.cpu.checks import check_queries
from kernels.cpu.code import Body
from kernels.cpu.threads import num_threads
from kernels.interface import PackedBatch


class AttentionPlan:
    """The work list of the present batch; made once a step, used in every layer."""

    def __init__(self, list_work: Body) -> None:
        self.threads = 1
        self._list_work = list_work
        self._batch: PackedBatch | None = None
        self._key: tuple[object, ...] = ()
        self._arguments = (ctypes.c_int64 * words.ATTENTION_WORDS)()
        self._memory: dict[str, Tensor] = {}

    def arguments_for(
        self, pool: Tensor, queries: Tensor, batch: PackedBatch, scale: float
    ) -> ctypes.Array[ctypes.c_int64]:
        """The argument block, all but the layer's own words.

        Raises: ValueError if the batch's tensors are not what the compiled code reads.
        """
        key = (pool.data_ptr(), pool.stride(), queries.shape, scale, num_threads())
        if batch is not self._batch or key != self._key:
            self._prepare(pool, queries, batch, scale)
            self._batch, self._key = batch, key
        return self._arguments

    def _prepare(self, pool: Tensor, queries: Tensor, batch: PackedBatch, scale: float) -> None:
        _check(pool, queries, batch)
        num_tokens, heads, head_dim = queries.shape
        kv_heads = pool.shape[2]
        group = heads // kv_heads
        tile = max(1, words.TILE_ROWS // group)
        self.threads = num_threads()
        num_rows = len(batch.context_lengths)
        longest = batch.block_tables.shape[1] * (pool.shape[4] // head_dim)
        parts = num_rows * kv_heads * (longest // words.PART_KEYS + 1)
        items = kv_heads * num_tokens + parts
        scratch = words.scratch_bytes(tile * group, head_dim)
        block = self._arguments
        block[words.ITEMS] = self._room("items", 8 * words.ITEM_WORDS * items)
        block[words.GROUPS] = self._room("groups", 8 * words.GROUP_WORDS * num_rows * kv_heads)
        block[words.PARTIALS] = self._room("partials", parts * words.partial_bytes(group, head_dim))
        block[words.SCRATCH] = self._room("scratch", scratch * self.threads)
        block[words.SCRATCH_BYTES] = scratch
        block[words.TABLES] = batch.block_tables.data_ptr()
        block[words.TABLE_BYTES] = 4 * batch.block_tables.stride(0)
        block[words.HEADS] = heads
        block[words.GROUP] = group
        block[words.HEAD_DIM] = head_dim
        block[words.BLOCK_SIZE] = pool.shape[4] // head_dim
        block[words.BLOCK_BYTES] = pool.stride(0) * pool.itemsize
        block[words.HEAD_BYTES] = pool.stride(2) * pool.itemsize
        block[words.SCALE] = words.float_bits(scale)
        block[words.COUNT] = self._list(batch, kv_heads, tile)

    def _list(self, batch: PackedBatch, kv_heads: int, tile: int) -> int:
        """Fill in items and groups; returns the number of items."""
        work = (ctypes.c_int64 * words.WORK_WORDS)()
        work[words.W_ROW_STARTS] = batch.row_starts.data_ptr()
        work[words.W_LENGTHS] = batch.context_lengths.data_ptr()
        work[words.W_NUM_ROWS] = len(batch.context_lengths)
        work[words.W_KV_HEADS] = kv_heads
        work[words.W_TILE] = tile
        work[words.W_ITEMS] = self._arguments[words.ITEMS]
        work[words.W_GROUPS] = self._arguments[words.GROUPS]
        self._list_work.run_here(ctypes.addressof(work))
        return work[words.W_NUM_ITEMS]

    def _room(self, name: str, count: int) -> int:
        """The address of at least `count` bytes, kept from step to step."""
        memory = self._memory.get(name)
        if memory is None or memory.numel() < count:
            memory = self._memory[name] = torch.empty(count, dtype=torch.uint8)
        return memory.data_ptr()


def _check(pool: Tensor, queries: Tensor, batch: PackedBatch) -> None:
    """What compiled code cannot check for itself."""
    check_queries(pool, queries, pool.dtype)
    for name in ("row_starts", "context_lengths", "block_tables"):
        tensor: Tensor = getattr(batch, name)
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be int32 and contiguous")
    if batch.slots.dtype != torch.int64 or not batch.slots.is_contiguous():
        raise ValueError("slots must be int64 and contiguous")
