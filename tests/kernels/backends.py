"""Every CPU back end that can run here: native for this CPU and for a lesser one, and numba."""

from collections.abc import Callable
from functools import cache
from typing import Final

import torch

from kernels.cpu.backend import CpuKernels
from kernels.cpu.native import library
from kernels.cpu.native.backend import NativeKernels
from kernels.cpu.native.build import library as build
from kernels.interface import Kernels, Quantization

KINDS: Final = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float32 over bfloat16": (torch.float32, torch.bfloat16),
    "float32 over int8": (torch.float32, torch.int8),
    "bfloat16 over int8": (torch.bfloat16, torch.int8),
}
"""What native kernels compute in, and what their pools store."""

INT8_KINDS: Final = {
    "bfloat16, int8 weights": (torch.bfloat16, torch.bfloat16),
    "float32 over int8, int8 weights": (torch.float32, torch.int8),
}
"""The same with --quantization int8."""

LESSER_FLAGS: Final = ("-mno-avx512f",)
VECTOR_FLAGS: Final = ("-mno-amx-bf16",) if library.native().splitflap_has_matrices() else ()
PLAIN_FLAGS: Final = ("-DSPLITFLAP_PLAIN_REGISTERS",)
"""Matrix registers in plain C++, as wide as AVX-512's: for CPUs that have none."""


@cache
def library_with(flags: tuple[str, ...]):  # type: ignore[no-untyped-def]
    """The library built with more flags."""
    return library.load(str(build(flags)))


def native_with(flags: tuple[str, ...]) -> Callable[..., Kernels]:
    """The same sources for another CPU."""

    def kernels(dtype: torch.dtype, quantization: Quantization | None = None) -> Kernels:
        return NativeKernels(dtype, library_with(flags), quantization)

    return kernels


NATIVE: Final[dict[str, Callable[..., Kernels]]] = {"native": NativeKernels}
if torch.backends.cpu.get_cpu_capability() == "AVX512":
    NATIVE["native AVX2"] = native_with(LESSER_FLAGS)

BACKENDS: Final = NATIVE | {"numba": CpuKernels}
