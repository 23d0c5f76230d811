"""Llama, Mistral, Qwen2, SmolLM: one decoder over a paged cache."""

import torch
from torch import Tensor

from kernels.interface import DecoderWeights, Kernels, PackedBatch, PoolSpec, token_bytes
from services.executor.model.config import LlamaConfig
from services.executor.model.layers import rotary_rows


class Llama:
    """A decoder of the Llama family. The residual stream is float32, whatever the dtype."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: DecoderWeights,
        kernels: Kernels,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`kv_dtype` is one of the back end's, its own dtype if it is None."""
        self.config = config
        self.shape = config.shape
        self.eos_token_ids = config.eos_token_ids
        self.pool_dtype = kv_dtype or kernels.dtype
        self.kv_dtype = str(self.pool_dtype).removeprefix("torch.")
        self.kv_bytes_per_token = token_bytes(self.shape, self.pool_dtype)
        self.times_auto = token_bytes(self.shape, kernels.dtype) / self.kv_bytes_per_token
        self.windows = tuple(layer.window for layer in weights.layers)
        self._weights = weights
        self.kernels = kernels
        self._eps = config.rms_norm_eps
        self._scale = config.head_dim**-0.5
        self._step = kernels.decoder_step(self.shape, weights, self._eps, self._scale)

    @property
    def is_one_step(self) -> bool:
        """True if the back end computes a whole step in one call."""
        return self._step is not None

    def allocate_pool(self, num_blocks: int, block_size: int) -> Tensor:
        """A pool in the back end's layout; its memory is not touched before it is written."""
        return self.kernels.allocate_pool(self._pool_spec(num_blocks, block_size))

    def allocate_swap_pool(self, num_blocks: int, block_size: int) -> Tensor:
        """A pool of the same layout in main memory, not touched before it is written either."""
        return self.kernels.allocate_swap_pool(self._pool_spec(num_blocks, block_size))

    def _pool_spec(self, num_blocks: int, block_size: int) -> PoolSpec:
        device = self._weights.final_norm.device
        return PoolSpec(self.shape, num_blocks, block_size, self.pool_dtype, device)

    @torch.inference_mode()
    def forward(self, pool: Tensor, batch: PackedBatch) -> Tensor:
        """Write the batch's keys and values, attend, and return logits.

        Returns: [num_logits, vocab_size] float32, one row per entry of `batch.logit_tokens`.
        """
        if self._step is not None:
            return self._step(pool, batch)
        kernels, weights, eps = self.kernels, self._weights, self._eps
        rotary = rotary_rows(batch.positions, weights.inverse_frequencies)
        residual = weights.embedding.embed(batch.token_ids)
        delta = None
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            hidden = kernels.add_rms_norm(residual, delta, layer.input_norm, eps)
            queries = kernels.rotate_and_write(pool, index, layer.qkv(hidden), rotary, batch)
            attended = kernels.paged_attention(
                pool, index, queries, batch, self._scale, layer.window
            ).flatten(1)
            if index == last:  # from here on, only tokens whose logits are wanted
                attended, residual = attended[batch.logit_tokens], residual[batch.logit_tokens]
            delta = layer.output(attended)
            hidden = kernels.add_rms_norm(residual, delta, layer.post_norm, eps)
            delta = layer.down(kernels.silu_mul(layer.gate_up(hidden)))
        hidden = kernels.add_rms_norm(residual, delta, weights.final_norm, eps)
        return weights.head.logits(hidden)

    @torch.inference_mode()
    def copy_blocks(self, source: Tensor, destination: Tensor, pairs: Tensor) -> None:
        """Copy whole blocks between pools or within one."""
        self.kernels.copy_blocks(source, destination, pairs)
