"""The default model with int8 weights: near the exact one, and not with its scales mixed up."""

import ctypes
from typing import Final

import numpy as np
import pytest
import torch

from kernels.cpu.native.backend import NativeKernels, NativeLinear
from ops.bench.kv_quality import TEXT, Quality, compare, pieces_of
from ops.bench.weight_quality import loaded
from services.executor.model.loader import load_onto
from shared.model_source import DEFAULT_MODEL, find_model

pytestmark = pytest.mark.model

NUM_TOKENS: Final = 300


class ScalesMoved(NativeKernels):
    """int8 weights with every scale of an output at the output beside it."""

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> NativeLinear:
        linear = super().pack_linear(weight, bias)
        matrix = linear.packed.matrix
        address = ctypes.cast(matrix.scales, ctypes.POINTER(ctypes.c_float))
        scales = np.ctypeslib.as_array(address, (matrix.outputs,))
        scales[:] = np.roll(scales, 1)
        return linear


@pytest.fixture(scope="module")
def qualities() -> dict[str, Quality]:
    source = find_model(DEFAULT_MODEL)
    names = ("float32", "bfloat16", "bfloat16+int8", "bfloat16+int8/int8")
    models = {name: loaded(name, source) for name in names}
    faulty = ScalesMoved(torch.bfloat16, quantization="int8")
    models["scales moved"] = load_onto(faulty, source, lambda _: None)
    return compare(models, pieces_of(TEXT, source, 1, NUM_TOKENS))


# Measured: bfloat16 99.3 %, 0.16e-3 and 8.1e-3; int8 94.0 %, 8.1e-3 and 4.8e-2; int8 cache too
# 93.6 %, 9.2e-3 and 5.2e-2. Scales at the output beside: 0 %.
def is_near(quality: Quality, exact: Quality) -> bool:
    """The bound."""
    return (
        quality.agreement > 0.9
        and quality.agreeing_clear > 0.98 * quality.clear
        and quality.error < 0.08 * quality.positions
        and quality.divergence < 0.015 * quality.positions
        and quality.perplexity < 1.03 * exact.perplexity
    )


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16+int8", "bfloat16+int8/int8"])
def test_int8_weights_are_near_the_exact_ones(qualities: dict[str, Quality], name: str) -> None:
    exact, quality = qualities["float32"], qualities[name]
    print(quality.row(name, 0))
    assert exact.positions == quality.positions == NUM_TOKENS - 1
    assert quality.clear > NUM_TOKENS / 3
    assert is_near(quality, exact)


def test_scales_at_the_output_beside_are_not(qualities: dict[str, Quality]) -> None:
    print(qualities["scales moved"].row("scales moved", 0))
    assert not is_near(qualities["scales moved"], qualities["float32"])
