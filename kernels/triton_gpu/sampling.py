"""Draws on the device. What asks for more than a temperature and cuts is adjusted before."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.triton_gpu.device.sampling import sample_kernel

_CHUNK = 4096
_BITS = 51
"""A sum of masses is a whole number of at most so many bits, as the CPU's are."""


@dataclass(frozen=True, slots=True)
class Draws:
    """One entry a draw, each [n], all on the device of the logits.

    Attributes:
        rows: int32, of the logits.
        temperatures: float32; 0 is greedy.
        top_ks: int32; 0 keeps all.
        top_ps: float64; 1 keeps all.
        min_ps: float32; 0 keeps all.
        seeds, indexes, positions: int64, the bits of what `services.executor.philox` takes.
    """

    rows: Tensor
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    seeds: Tensor
    indexes: Tensor
    positions: Tensor


def sample(logits: Tensor, draws: Draws, chunk: int = _CHUNK, out: Tensor | None = None) -> Tensor:
    """Draw tokens by the rules of the executor's CPU sampler, with the same dice.

    Greedy is the same token. What top-k keeps is the same set. Sums are exact. Else a token may
    differ from the CPU's where the die falls within rounding of the border between two of them, or
    a sum within rounding of top-p or min-p: exponentials differ in their last bits. Where these are
    exact, as with equal logits, every token is the same.

    Args:
        logits: [num_logits, vocab_size] float32.
        out: [n] int32 to write to; if None, it is made.
    Returns: [n] int32; -1 where the logits hold NaN, +inf or nothing finite.
    """
    tokens = out
    if tokens is None:
        tokens = torch.empty(len(draws.rows), dtype=torch.int32, device=logits.device)
    if len(tokens):
        sample_kernel[(len(tokens),)](
            tokens, logits, draws.rows, draws.temperatures, draws.top_ks, draws.top_ps,
            draws.min_ps, draws.seeds, draws.indexes, draws.positions,
            logits.shape[1], logits.stride(0), _units(logits.shape[1]), CHUNK=chunk, num_warps=8,
        )  # fmt: skip
    return tokens


def _units(vocab_size: int) -> float:
    """How many units the likeliest token's mass is."""
    return float(2 ** (_BITS - (vocab_size - 1).bit_length()))
