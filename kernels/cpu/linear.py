"""Linear layers on the CPU: weights prepacked by oneDNN where this build of torch can do it.

oneDNN's blocked weights halve the time of a decode step's small products (docs/decisions). The two
operators are private to torch, so they are looked up and tried before they are trusted; without
them a plain `F.linear` does the same work.
"""

from functools import cache

import torch
from torch import Tensor

from kernels.interface import Linear
from kernels.reference import PlainLinear
from shared.logs import get_logger

log = get_logger("kernels")


class PackedLinear:
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


def pack_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Take over `weight` [out_features, in_features] in the fastest form that is right here."""
    if packing_works(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """True if the private operators are there and agree with `F.linear` on a small product."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 40, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    x = torch.randn(3, 40, generator=generator).to(dtype)
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    try:
        got = PackedLinear(weight, bias)(x).float()
        plain = PackedLinear(weight, None)(x).float() + bias.float()
    except (AttributeError, RuntimeError, TypeError) as error:
        log.warning("packed_linears_unavailable", error=str(error), instead="F.linear")
        return False
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
    if all(torch.allclose(y, expected, atol=tolerance, rtol=tolerance) for y in (got, plain)):
        return True
    log.warning("packed_linears_wrong", dtype=str(dtype), instead="F.linear")
    return False
