"""Decoders of the Llama family with random weights, on any device."""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from kernels.interface import DecoderLayer, DecoderWeights, Kernels
from services.executor.model.config import LlamaConfig
from services.executor.model.layers import inverse_frequencies
from services.executor.model.llama import Llama

LLAMA_2_7B: Final = LlamaConfig(
    model_type="llama", hidden_size=4096, intermediate_size=11_008, num_layers=32, num_heads=32,
    num_kv_heads=32, head_dim=128, vocab_size=32_000, max_position_embeddings=4096,
    rms_norm_eps=1e-5, rope_theta=10_000.0, rope_scaling=None, tied=False,
    qkv_bias=False, output_bias=False, mlp_bias=False, eos_token_ids=(),
)  # fmt: skip
TINY: Final = replace(
    LLAMA_2_7B, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, vocab_size=117, max_position_embeddings=512,
)  # fmt: skip


def random_llama(
    kernels: Kernels, config: LlamaConfig, device: torch.device, made_on: torch.device | None = None
) -> Llama:
    """The same weights each time for one `made_on`, which is `device` if it is None."""
    random = torch.Generator(made_on or device).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype, scale: float) -> Tensor:
        numbers = torch.empty(*shape, dtype=dtype, device=random.device)
        return numbers.normal_(0, scale, generator=random).to(device)

    def matrix(outputs: int, inputs: int) -> Tensor:
        return normal(outputs, inputs, dtype=kernels.dtype, scale=1.5 * inputs**-0.5)

    def norm() -> Tensor:
        return 1 + normal(config.hidden_size, dtype=torch.float32, scale=0.2)

    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    layers = tuple(
        DecoderLayer(
            input_norm=norm(),
            qkv=kernels.pack_linear(matrix(queries + 2 * keys, hidden), None),
            output=kernels.pack_linear(matrix(hidden, queries), None),
            post_norm=norm(),
            gate_up=kernels.pack_linear(matrix(2 * inner, hidden), None),
            down=kernels.pack_linear(matrix(hidden, inner), None),
        )
        for _ in range(config.num_layers)
    )
    weights = DecoderWeights(
        embedding=kernels.pack_vocabulary(matrix(config.vocab_size, hidden)),
        layers=layers,
        final_norm=norm(),
        head=kernels.pack_vocabulary(matrix(config.vocab_size, hidden)),
        inverse_frequencies=inverse_frequencies(config).to(device),
    )
    return Llama(config, weights, kernels)


def step_bytes(config: LlamaConfig, element_bytes: int) -> int:
    """Of the weights that a step reads whole: all but the embedding, of which it takes rows."""
    queries, keys = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    layer = 2 * queries + 2 * keys + 3 * config.intermediate_size
    numbers = config.num_layers * layer + config.vocab_size
    return numbers * config.hidden_size * element_bytes
