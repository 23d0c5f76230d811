"""Linear layers on the CPU, in the fastest form that is right here.

1. Tiles: our own machine code, where the CPU has AVX-512 (and its bfloat16 dot product).
2. oneDNN's blocked weights, through two operators private to torch: looked up and tried before they
   are trusted. They halve the time of small products.
3. `F.linear` on the weight as it is.
"""

from functools import cache

import torch
from torch import Tensor

from kernels.cpu.features import has_tiles
from kernels.cpu.tiled import TiledLinear, TiledVocabulary, fits_tiles
from kernels.interface import Linear, Vocabulary
from kernels.reference import PlainLinear, PlainVocabulary
from shared.logs import get_logger

log = get_logger("kernels")


def pack_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Take over `weight` [out_features, in_features] and `bias` [out_features]."""
    if has_tiles(weight.dtype) and fits_tiles(weight):
        return TiledLinear(weight, bias)
    if onednn_packs(weight.dtype):
        return OneDnnLinear(weight, bias)
    return PlainLinear(weight, bias)


def pack_vocabulary(weight: Tensor) -> Vocabulary:
    """Take over `weight` [vocab_size, hidden_size].

    Without tiles it stays as it is: oneDNN's form cannot be read row by row, and a second copy
    would cost more memory than it saves time.
    """
    if has_tiles(weight.dtype) and fits_tiles(weight):
        return TiledVocabulary(weight)
    return PlainVocabulary(weight)


class OneDnnLinear:
    """A weight in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return product


@cache
def onednn_packs(dtype: torch.dtype) -> bool:
    """True if the private operators are there and agree with `F.linear` on a small product."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 40, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    x = torch.randn(3, 40, generator=generator).to(dtype)
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    try:
        got = OneDnnLinear(weight, bias)(x).float()
        plain = OneDnnLinear(weight, None)(x).float() + bias.float()
    except (AttributeError, RuntimeError, TypeError) as error:
        log.warning("onednn_packing_unavailable", error=str(error), instead="F.linear")
        return False
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
    if all(torch.allclose(y, expected, atol=tolerance, rtol=tolerance) for y in (got, plain)):
        return True
    log.warning("onednn_packing_wrong", dtype=str(dtype), instead="F.linear")
    return False
