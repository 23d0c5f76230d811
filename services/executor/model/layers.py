"""Rotary positions of the Llama family."""

import math

import torch
from torch import Tensor

from services.executor.model.config import LlamaConfig, RopeScaling


def inverse_frequencies(config: LlamaConfig, divisors: Tensor | None = None) -> Tensor:
    """Radians per position of each rotated pair: [head_dim / 2] float32.

    `divisors` [head_dim / 2] stretches each one by its own factor (a GGUF's `rope_freqs`), and
    comes on top of the scaling, as in llama.cpp.
    Source: Su et al. 2021, RoFormer, section 3.2.2.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if divisors is not None:
        frequencies = frequencies / divisors
    if config.rope_scaling is None:
        return frequencies
    if config.rope_scaling.kind == "linear":
        return frequencies / config.rope_scaling.factor
    return _llama3_frequencies(frequencies, config.rope_scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves slowed by `factor`, short ones kept, a linear blend between.

    Source: Llama 3.1's reference code (`apply_scaling`), as in transformers' `llama3` rope type.
    """
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    long = wavelengths > context / scaling.low_freq_factor
    short = wavelengths < context / scaling.high_freq_factor
    return torch.where(long, frequencies / scaling.factor, blended).where(~short, frequencies)


def rotary_rows(positions: Tensor, frequencies: Tensor) -> Tensor:
    """[num_tokens, head_dim] float32: cosines, then sines, of each token's angles."""
    angles = positions.float().unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)
