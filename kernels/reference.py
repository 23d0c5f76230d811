"""The reference back end: obviously right, never fast. What every other back end is held against.

Its pool is `[num_blocks, num_layers, kv_heads, 2, block_size, head_dim]`, keys then values; in int8
the two bytes of a vector's scale follow its numbers.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.interface import (
    SCALE_BYTES,
    DecoderStep,
    DecoderWeights,
    Linear,
    PackedBatch,
    PoolSpec,
    Vocabulary,
    vector_elements,
)
from shared.geometry import ModelShape

KEYS, VALUES = 0, 1
MOST_INT8 = 127


class ReferenceKernels:
    """Plain tensor operations with loops over rows and heads; any dtype, any device."""

    name = "reference"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.kv_dtypes = tuple(dict.fromkeys((dtype, torch.bfloat16, torch.int8)))
        self.has_windows = True

    def allocate_pool(self, spec: PoolSpec) -> Tensor:
        """Memory for one pool, not cleared."""
        shape = spec.shape
        return torch.empty(
            (
                *(spec.num_blocks, shape.num_layers, shape.num_kv_heads),
                *(2, spec.block_size, vector_elements(shape.head_dim, spec.dtype)),
            ),
            dtype=spec.dtype,
            device=spec.device,
        )

    def allocate_swap_pool(self, spec: PoolSpec) -> Tensor:
        """The same in main memory; pinned if the pool is a GPU's, so that it copies by itself."""
        pool = self.allocate_pool(replace(spec, device=torch.device("cpu")))
        return pool.pin_memory() if spec.device.type == "cuda" else pool

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The weight as it is."""
        return PlainLinear(weight, bias)

    def pack_vocabulary(self, weight: Tensor) -> Vocabulary:
        """The weight as it is."""
        return PlainVocabulary(weight)

    def write_kv(
        self, pool: Tensor, layer: int, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        """Store keys and values [num_tokens, kv_heads, head_dim] at `slots`."""
        block_size = pool.shape[4]
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, block_size)
            pool[block, layer, :, KEYS, offset] = stored(keys[token], pool.dtype)
            pool[block, layer, :, VALUES, offset] = stored(values[token], pool.dtype)

    def paged_attention(
        self,
        pool: Tensor,
        layer: int,
        queries: Tensor,
        batch: PackedBatch,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Attend row by row, token by token, over keys gathered through the block table."""
        attended = torch.empty_like(queries)
        group = _group(queries.shape[1], pool.shape[2])
        starts, lengths = batch.row_starts.tolist(), batch.context_lengths.tolist()
        for row, length in enumerate(lengths):
            keys = self._gather(pool, layer, KEYS, batch.block_tables[row], length)
            values = self._gather(pool, layer, VALUES, batch.block_tables[row], length)
            for token in range(starts[row], starts[row + 1]):
                visible = length - (starts[row + 1] - 1 - token)
                first = max(0, visible - window) if window else 0
                for head in range(queries.shape[1]):
                    k, v = keys[first:visible, head // group], values[first:visible, head // group]
                    scores = k @ _exact(queries[token, head]) * scale
                    attended[token, head] = (scores.softmax(0) @ v).to(queries.dtype)
        return attended

    def _gather(self, pool: Tensor, layer: int, part: int, table: Tensor, length: int) -> Tensor:
        """Keys or values of one sequence, [length, kv_heads, head_dim], at least float32."""
        block_size = pool.shape[4]
        places = [
            pool[int(table[position // block_size]), layer, :, part, position % block_size]
            for position in range(length)
        ]
        return restored(torch.stack(places))

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        """Add `delta` in place; x / sqrt(mean(x^2) + eps) * weight."""
        if delta is not None:
            residual += delta
        mean_square = residual.pow(2).mean(-1, keepdim=True)
        return (residual * torch.rsqrt(mean_square + eps) * weight).to(self.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up."""
        gate, up = _exact(gate_up).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    def rotate_and_write(
        self, pool: Tensor, layer: int, qkv: Tensor, rotary: Tensor, batch: PackedBatch
    ) -> Tensor:
        """Rotate queries and keys, store keys and values, return the queries."""
        queries, keys, values = rotated(qkv, rotary, pool.shape[2])
        self.write_kv(pool, layer, keys, values, batch.slots)
        return queries

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks, one after the other."""
        for from_block, to_block in pairs.tolist():
            destination[to_block] = source[from_block]

    def decoder_step(
        self, shape: ModelShape, weights: DecoderWeights, eps: float, scale: float
    ) -> DecoderStep | None:
        """There is none."""
        return None


class PlainLinear:
    """`x @ weight.T + bias`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        return torch.nn.functional.linear(x, self._weight, self._bias)


class PlainVocabulary:
    """Rows of a matrix, and products with all of them."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size] float32."""
        return torch.nn.functional.embedding(token_ids, self._weight).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_logits, hidden_size] -> [num_logits, vocab_size] float32."""
        return torch.nn.functional.linear(hidden, self._weight).float()


def rotated(qkv: Tensor, rotary: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned by their positions, and values: [num_tokens, heads, head_dim] each.

    `qkv` and `rotary` are as in `rotate_and_write`.
    """
    heads = qkv.view(len(qkv), -1, rotary.shape[1])
    num_queries = heads.shape[1] - 2 * kv_heads
    queries, keys, values = torch.split(heads, [num_queries, kv_heads, kv_heads], dim=1)
    return rotate(queries, rotary), rotate(keys, rotary), values


def rotate(heads: Tensor, rotary: Tensor) -> Tensor:
    """Rotary positions on [num_tokens, heads, head_dim]; `rotary` as in `rotate_and_write`."""
    cosines, sines = rotary.unsqueeze(1).chunk(2, dim=-1)
    first, second = _exact(heads).chunk(2, dim=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(turned, dim=-1).to(heads.dtype)


def stored(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values [..., head_dim] as a pool of `dtype` keeps them; int8 as `PoolSpec` says."""
    if dtype != torch.int8:
        return vectors.to(dtype)
    vectors = vectors.float()
    exact = vectors.abs().amax(-1, keepdim=True) / MOST_INT8
    scale = exact.bfloat16()
    scale = torch.where(
        scale.float() < exact, scale.nextafter(torch.full_like(scale, torch.inf)), scale
    )
    scale = torch.where(vectors.isfinite().all(-1, keepdim=True), scale, torch.nan)
    numbers = torch.where(scale > 0, vectors / scale.float(), 0).round().to(torch.int8)
    return torch.cat((numbers, scale.view(torch.int8)), dim=-1)


def restored(vectors: Tensor) -> Tensor:
    """Keys or values of a pool as numbers, [..., head_dim], at least float32."""
    if vectors.dtype != torch.int8:
        return _exact(vectors)
    numbers, scale = (
        vectors[..., :-SCALE_BYTES],
        vectors[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16),
    )
    return numbers.float() * scale.float()


def _group(heads: int, kv_heads: int) -> int:
    """Query heads per key-value head."""
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} key-value heads do not divide {heads} query heads")
    return heads // kv_heads


def _exact(x: Tensor) -> Tensor:
    """At least float32, so that sums do not round to the storage dtype."""
    return x if x.dtype == torch.float64 else x.float()
