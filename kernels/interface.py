"""What a kernel back end must do, and what it may do. All shapes are named here and nowhere else.

A pool holds the keys and values of all layers, cut into blocks. Only the back end knows its
layout; everybody else names blocks by id. `slot` = block id * block_size + offset in the block.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from shared.geometry import ModelShape

Quantization = Literal["int8"]
"""What weights may be kept as, beside a back end's own dtype."""

SCALE_BYTES = 2
"""Of the scale of one key or value in an int8 pool: a bfloat16."""


def vector_elements(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of one key or value in a pool of `dtype`: its numbers, and in int8 its scale.

    >>> vector_elements(64, torch.bfloat16), vector_elements(64, torch.int8)
    (64, 66)
    """
    return head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)


def token_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token over all layers in a pool of `dtype`."""
    num_vectors = 2 * shape.num_layers * shape.num_kv_heads
    return num_vectors * vector_elements(shape.head_dim, dtype) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Everything that decides the size and layout of one pool; `dtype` is what it stores.

    In int8 a key or a value x is stored as round(x / scale), where scale is the smallest bfloat16
    that is no less than max|x| / 127. It is made of this one vector, so that computing a token
    again gives the same bytes, and lies in the token's block, so that copies of blocks are whole.
    Zeros have scale 0; a vector with a NaN or an infinity has scale NaN.
    """

    shape: ModelShape
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_size * token_bytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PackedBatch:
    """All rows of one step, packed end to end; prefill and decode rows mix freely.

    Attributes:
        token_ids: [num_tokens] int64.
        positions: [num_tokens] int32, place of each token in its sequence.
        slots: [num_tokens] int64, where each token's key and value are written.
        row_starts: [num_rows + 1] int32, first token of each row; the last entry is num_tokens.
        context_lengths: [num_rows] int32, tokens of each sequence after this step.
        block_tables: [num_rows, max_blocks] int32; entries past a row's last block are never read.
        logit_tokens: [num_logits] int64, packed indices of the tokens whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    row_starts: Tensor
    context_lengths: Tensor
    block_tables: Tensor
    logit_tokens: Tensor


class Linear(Protocol):
    """A weight matrix, packed as the back end likes it."""

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features], dtype of x."""


class Vocabulary(Protocol):
    """A matrix with one row per token: embeddings on the way in, the head on the way out, or both.

    A model whose head is tied to its embeddings has one of these, in memory once.
    """

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size] float32."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_logits, hidden_size], dtype of the back end -> [num_logits, vocab_size] float32."""


class Kernels(Protocol):
    """The primitive operations on a paged pool. `layer` is an index, 0 .. num_layers - 1.

    Attributes:
        dtype: of weights and activations.
        kv_dtypes: what pools may store, `dtype` first.
        has_windows: if attention can be told a window.
    """

    name: str
    dtype: torch.dtype
    kv_dtypes: tuple[torch.dtype, ...]
    has_windows: bool

    def allocate_pool(self, spec: PoolSpec) -> Tensor:
        """Memory for one pool; its pages need not be touched until they are written."""

    def allocate_swap_pool(self, spec: PoolSpec) -> Tensor:
        """Main memory for blocks swapped out of a pool, laid out alike; pinned if a GPU's."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Take over `weight` [out_features, in_features] (and `bias` [out_features])."""

    def pack_vocabulary(self, weight: Tensor) -> Vocabulary:
        """Take over `weight` [vocab_size, hidden_size]."""

    def write_kv(
        self, pool: Tensor, layer: int, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        """Store keys and values [num_tokens, kv_heads, head_dim] at `slots` [num_tokens] int64."""

    def paged_attention(
        self,
        pool: Tensor,
        layer: int,
        queries: Tensor,
        batch: PackedBatch,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Attend each query to its sequence's keys up to itself, through its block table.

        Args:
            pool: from `allocate_pool`.
            layer: which layer's keys and values.
            queries: [num_tokens, heads, head_dim]; kv_heads divides heads.
            batch: the rows, with their tables and lengths.
            scale: usually 1/sqrt(head_dim); passed explicitly.
            window: how many of the last keys a query sees, its own included; None: all.
        Returns: [num_tokens, heads, head_dim], dtype of queries.
        Source: Kwon et al. 2023, sections 4.1 and 5.1.
        """

    def add_rms_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        """Add `delta` to `residual` in place, and return the root-mean-square norm of the sum.

        Args:
            residual: [num_tokens, hidden_size] float32, changed in place.
            delta: [num_tokens, hidden_size], dtype of the back end; None adds nothing.
            weight: [hidden_size] float32.
        Returns: [num_tokens, hidden_size], dtype of the back end.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half of each row: [num_tokens, 2 n] -> [num_tokens, n]."""

    def rotate_and_write(
        self, pool: Tensor, layer: int, qkv: Tensor, rotary: Tensor, batch: PackedBatch
    ) -> Tensor:
        """Turn queries and keys by their positions and store keys and values in the pool.

        Args:
            qkv: [num_tokens, (heads + 2 kv_heads) * head_dim]: queries, keys, values.
            rotary: [num_tokens, head_dim] float32: head_dim/2 cosines, then head_dim/2 sines, of
                each token's position; number i turns the pair (i, i + head_dim/2).
            batch: its `slots` say where each token goes.
        Returns: the queries, [num_tokens, heads, head_dim], dtype of qkv.
        """

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks over all layers, source pool to destination pool (may be the same).

        Args:
            pairs: [num_copies, 2] int64, (source block, destination block); in one call no block
                is both source and destination, none is destination twice.
        """

    def decoder_step(
        self, shape: ModelShape, weights: "DecoderWeights", eps: float, scale: float
    ) -> "DecoderStep | None":
        """The whole step of a model of this form, or None: then it is put together from the above.

        Args:
            weights: all packed by this back end.
            eps: of the norms.
            scale: of attention, usually 1/sqrt(head_dim).
        """


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights; q, k, v are one matrix, and so are gate and up.

    `window` is as in `Kernels.paged_attention`.
    """

    input_norm: Tensor
    qkv: Linear
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model's weights, packed by its back end; a tied head is the embedding itself.

    Norms are float32; `inverse_frequencies` [head_dim / 2] float32 are radians per position.
    """

    embedding: Vocabulary
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    head: Vocabulary
    inverse_frequencies: Tensor


class DecoderStep(Protocol):
    """A whole decoder step in one call, where a back end has one; owns its packed weights."""

    def __call__(self, pool: Tensor, batch: PackedBatch) -> Tensor:
        """Write keys and values, attend, and return logits [num_logits, vocab_size] float32."""
