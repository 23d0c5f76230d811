"""The native CPU back end: products, attention and whole decoder steps in C++.

Its pool is `[num_blocks, num_layers, kv_heads, 2, block_size * head_dim]`, int8 two bytes more a
token; what a tile holds is in `pool.h`.
"""

import ctypes
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.checks import check_copy, check_queries
from kernels.cpu.memory import advise_huge_pages
from kernels.cpu.native import library
from kernels.cpu.native.packing import Packed
from kernels.interface import (
    DecoderStep,
    DecoderWeights,
    Linear,
    PackedBatch,
    PoolSpec,
    Quantization,
    Vocabulary,
    vector_elements,
)
from kernels.reference import ReferenceKernels, rotated
from shared.geometry import ModelShape

_BEYOND: Final = 256
"""Elements past a pool's end that a load of its last tile may touch."""

_NUMBERS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""`Numbers` of `pool.h`."""


class NativeKernels:
    """bfloat16 or float32 on a CPU, in C++."""

    name = "native"

    def __init__(
        self,
        dtype: torch.dtype,
        native: ctypes.CDLL | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """`native` is the library to use, this CPU's own if it is None.

        With `quantization` int8 all matrices are packed as int8 and multiplied with inputs in int8
        (`packing.py`); everything else is as without it.
        Raises: NotBuilt if there is no library.
        """
        self.dtype = dtype
        self.kv_dtypes = tuple(dict.fromkeys((dtype, torch.bfloat16, torch.int8)))
        self.has_windows = True
        self.quantization = quantization
        self._native = library.native() if native is None else native
        self._is_bf16 = int(dtype == torch.bfloat16)
        self._plain = ReferenceKernels(dtype)
        """For models without a native step: what no kernel is written for."""

    def allocate_pool(self, spec: PoolSpec) -> Tensor:
        """Memory for one pool, not touched."""
        size = spec.block_size * vector_elements(spec.shape.head_dim, spec.dtype)
        shape = (spec.num_blocks, spec.shape.num_layers, spec.shape.num_kv_heads, 2, size)
        count = torch.Size(shape).numel()
        memory = torch.empty(count + _BEYOND, dtype=spec.dtype)
        advise_huge_pages(memory)
        return memory[:count].view(shape)

    def allocate_swap_pool(self, spec: PoolSpec) -> Tensor:
        """Another pool: all is main memory."""
        return self.allocate_pool(spec)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The weight in tiles."""
        return NativeLinear(self._packed(weight, bias), self._native)

    def pack_vocabulary(self, weight: Tensor) -> Vocabulary:
        """The weight in tiles, of which rows can still be picked."""
        return NativeVocabulary(self._packed(weight, None), self._native)

    def _packed(self, weight: Tensor, bias: Tensor | None) -> Packed:
        return Packed.of(self._native, self.dtype, self.quantization, weight, bias)

    def write_kv(
        self, pool: Tensor, layer: int, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        """Store keys and values at `slots`."""
        keys, values, slots = keys.contiguous(), values.contiguous(), slots.contiguous()
        _, kv_heads, head_dim = keys.shape
        self._native.splitflap_write(
            self._is_bf16, _pool(pool, head_dim), layer, kv_heads, head_dim, keys.data_ptr(),
            values.data_ptr(), slots.data_ptr(), len(slots), torch.get_num_threads(),
        )  # fmt: skip

    def paged_attention(
        self,
        pool: Tensor,
        layer: int,
        queries: Tensor,
        batch: PackedBatch,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Attend through the block table, threads taking rows and heads as they come free."""
        check_queries(pool, queries, self.dtype)
        _check_batch(batch)
        queries = queries.contiguous()
        attended = torch.empty_like(queries)
        _, heads, head_dim = queries.shape
        outcome = self._native.splitflap_attend(
            self._is_bf16, _pool(pool, head_dim), layer, _batch(batch), heads, pool.shape[2],
            head_dim, scale, window or 0, queries.data_ptr(), attended.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        library.raise_if_failed(outcome, len(queries))
        return attended

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
        """Rotate queries and keys, store keys and values, return the queries."""
        queries, keys, values = rotated(qkv, rotary, pool.shape[2])
        self.write_kv(pool, layer, keys, values, batch.slots)
        return queries

    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks, each one run of memory; threads take pieces as they come free.

        Raises: ValueError if the tensors are not what the library reads.
        """
        if not len(pairs):
            return
        check_copy(source, destination, pairs)
        self._native.splitflap_copy(
            source.data_ptr(), destination.data_ptr(), pairs.data_ptr(), len(pairs),
            source.stride(0) * source.itemsize, torch.get_num_threads(),
        )  # fmt: skip

    def decoder_step(
        self, shape: ModelShape, weights: DecoderWeights, eps: float, scale: float
    ) -> DecoderStep | None:
        """The whole step in one call; None if the activations are no whole number of tiles."""
        inner = [_matrix(layer.down).inputs for layer in weights.layers]
        if any(count % self._native.splitflap_lanes() for count in inner):
            return None
        return NativeStep(shape, weights, eps, scale, self._native, self._is_bf16)


class NativeLinear:
    """A linear layer."""

    def __init__(self, packed: Packed, native: ctypes.CDLL) -> None:
        self.packed = packed
        self._native = native

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        return self.packed.multiply(self._native, x, self.packed.dtype)


class NativeVocabulary:
    """Embeddings and head. Logits are not rounded to bfloat16: near ties stay apart."""

    def __init__(self, packed: Packed, native: ctypes.CDLL) -> None:
        self.packed = packed
        self._native = native

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size] float32."""
        matrix = self.packed.matrix
        _check_ids(token_ids, matrix.outputs)
        token_ids = token_ids.contiguous()
        rows = torch.empty((len(token_ids), matrix.inputs))
        is_bf16 = int(self.packed.dtype == torch.bfloat16)
        self._native.splitflap_rows(
            is_bf16, matrix, token_ids.data_ptr(), len(token_ids), rows.data_ptr()
        )
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_logits, hidden_size] -> [num_logits, vocab_size] float32."""
        return self.packed.multiply(self._native, hidden, torch.float32)


class NativeStep:
    """A whole decoder step in one call of the library."""

    def __init__(
        self,
        shape: ModelShape,
        weights: DecoderWeights,
        eps: float,
        scale: float,
        native: ctypes.CDLL,
        is_bf16: int,
    ) -> None:
        self._native = native
        self._shape = shape
        self._weights = weights  # keeps the memory that the structs point to
        self._layers = (library.Layer * shape.num_layers)()
        for struct, layer in zip(self._layers, weights.layers, strict=True):
            struct.input_norm = layer.input_norm.data_ptr()
            struct.post_norm = layer.post_norm.data_ptr()
            struct.qkv, struct.output = _matrix(layer.qkv), _matrix(layer.output)
            struct.gate_up, struct.down = _matrix(layer.gate_up), _matrix(layer.down)
            struct.window = layer.window or 0
        self._decoder = library.Decoder(
            is_bf16=is_bf16,
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            intermediate_size=_matrix(weights.layers[0].down).inputs,
            vocab_size=shape.vocab_size,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            eps=eps,
            scale=scale,
            layers=self._layers,
            final_norm=weights.final_norm.data_ptr(),
            frequencies=weights.inverse_frequencies.data_ptr(),
            embedding=_matrix(weights.embedding),
            head=_matrix(weights.head),
        )

    def __call__(self, pool: Tensor, batch: PackedBatch) -> Tensor:
        """Write keys and values, attend, and return logits [num_logits, vocab_size] float32."""
        _check_ids(batch.token_ids, self._shape.vocab_size)
        _check_batch(batch)
        logits = torch.empty((len(batch.logit_tokens), self._shape.vocab_size))
        outcome = self._native.splitflap_step(
            self._decoder, _pool(pool, self._shape.head_dim), _batch(batch), logits.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        library.raise_if_failed(outcome, len(batch.token_ids))
        return logits


def _matrix(module: Linear | Vocabulary) -> library.Matrix:
    """The struct of a matrix that this back end has packed."""
    if not isinstance(module, NativeLinear | NativeVocabulary):
        raise TypeError(f"{type(module).__name__} was packed by another back end")
    return module.packed.matrix


def _pool(pool: Tensor, head_dim: int) -> library.Pool:
    blocks, layers, heads = pool.stride()[:3]
    block_size = pool.shape[4] // vector_elements(head_dim, pool.dtype)
    return library.Pool(pool.data_ptr(), blocks, layers, heads, block_size, _NUMBERS[pool.dtype])


def _batch(batch: PackedBatch) -> library.Batch:
    return library.Batch(
        batch.token_ids.data_ptr(), batch.positions.data_ptr(), batch.slots.data_ptr(),
        batch.row_starts.data_ptr(), batch.context_lengths.data_ptr(),
        batch.block_tables.data_ptr(), batch.block_tables.stride(0), len(batch.context_lengths),
        len(batch.token_ids), batch.logit_tokens.data_ptr(), len(batch.logit_tokens),
    )  # fmt: skip


def _check_batch(batch: PackedBatch) -> None:
    """Types and strides of a batch. Raises: ValueError naming the tensor that is wrong."""
    for name in ("positions", "row_starts", "context_lengths", "block_tables"):
        tensor: Tensor = getattr(batch, name)
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be int32 and contiguous")
    for name in ("token_ids", "slots", "logit_tokens"):
        tensor = getattr(batch, name)
        if tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be int64 and contiguous")


def _check_ids(token_ids: Tensor, vocab_size: int) -> None:
    if len(token_ids) == 0:
        return
    ids = token_ids.numpy()  # whose least and greatest cost less than torch's
    lowest, highest = ids.min(), ids.max()
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"token id {wrong} is outside the vocabulary of {vocab_size}")
