"""Which back end and which dtype a device gets."""

import torch

from kernels.cpu.backend import CpuKernels
from kernels.cpu.features import has_fast_bf16
from kernels.cpu.native.backend import NativeKernels
from kernels.cpu.native.build import NotBuilt
from kernels.cpu.native.drawing import NativeDraws
from kernels.interface import Kernels
from shared.errors import StartError
from shared.logs import get_logger

log = get_logger("kernels")

CPU_DTYPES = (torch.bfloat16, torch.float32)


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest back end for `device` that is right for `dtype`.

    Raises: StartError if there is none.
    """
    if device.type != "cpu":
        raise StartError(f"device {device}: this version has kernels for the CPU only")
    if dtype not in CPU_DTYPES:
        raise StartError(
            f"--dtype {str(dtype).removeprefix('torch.')}: the CPU computes in bfloat16 or "
            "float32; choose one of them, or auto"
        )
    try:
        return NativeKernels(dtype)
    except NotBuilt as reason:
        log.warning("native_kernels_unavailable", why=str(reason), instead="numba's machine code")
    return CpuKernels(dtype)


def select_draws(device: torch.device) -> NativeDraws | None:
    """What draws tokens from logits faster than NumPy on `device`; None if nothing does."""
    if device.type != "cpu":
        return None
    try:
        return NativeDraws()
    except NotBuilt:  # which `select_kernels` tells of
        return None


def default_dtype(device: torch.device) -> torch.dtype:
    """What `--dtype auto` means: bfloat16 where the device computes in it, else float32."""
    if device.type != "cpu" or has_fast_bf16():
        return torch.bfloat16
    return torch.float32
