"""Small decoders with random weights, for any back end."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import DecoderLayer, DecoderWeights, Kernels
from services.executor.model.config import LlamaConfig
from services.executor.model.layers import inverse_frequencies
from services.executor.model.llama import Llama


@dataclass(frozen=True)
class Sizes:
    """What a random decoder is made of; by default nothing is a whole number of tiles but inner."""

    hidden: int = 72
    inner: int = 96
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 24
    layers: int = 2
    vocab: int = 117
    tied: bool = True
    has_bias: bool = False
    longest: int = 16_384
    windows: tuple[int | None, ...] = ()


def random_decoder(
    kernels: Kernels, sizes: Sizes = Sizes(), kv_dtype: torch.dtype | None = None
) -> Llama:
    """The same weights for every back end of a dtype."""
    config = LlamaConfig(
        model_type="llama", hidden_size=sizes.hidden, intermediate_size=sizes.inner,
        num_layers=sizes.layers, num_heads=sizes.heads, num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim, vocab_size=sizes.vocab, max_position_embeddings=sizes.longest,
        rms_norm_eps=1e-5, rope_theta=10_000.0, rope_scaling=None, tied=sizes.tied,
        qkv_bias=sizes.has_bias, output_bias=sizes.has_bias, mlp_bias=sizes.has_bias,
        eos_token_ids=(0,), windows=sizes.windows,
    )  # fmt: skip
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    def matrix(outputs: int, inputs: int):  # type: ignore[no-untyped-def]
        weight = (1.5 * normal(outputs, inputs) / inputs**0.5).to(kernels.dtype)
        bias = (0.3 * normal(outputs)).to(kernels.dtype) if sizes.has_bias else None
        return kernels.pack_linear(weight, bias)

    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    embedding = kernels.pack_vocabulary(normal(sizes.vocab, sizes.hidden).to(kernels.dtype))
    layers = tuple(
        DecoderLayer(
            input_norm=1 + 0.2 * normal(sizes.hidden),
            qkv=matrix(queries + 2 * keys, sizes.hidden),
            output=matrix(sizes.hidden, queries),
            post_norm=1 + 0.2 * normal(sizes.hidden),
            gate_up=matrix(2 * sizes.inner, sizes.hidden),
            down=matrix(sizes.hidden, sizes.inner),
            window=config.window_of(index),
        )
        for index in range(sizes.layers)
    )
    weights = DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=1 + 0.2 * normal(sizes.hidden),
        head=embedding
        if sizes.tied
        else kernels.pack_vocabulary(normal(sizes.vocab, sizes.hidden).to(kernels.dtype)),
        inverse_frequencies=inverse_frequencies(config),
    )
    return Llama(config, weights, kernels, kv_dtype)
