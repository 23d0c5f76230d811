"""Which back end and which dtype a device gets."""

import os

import torch

from kernels.cpu.backend import CpuKernels
from kernels.cpu.features import has_fast_bf16
from kernels.cpu.native.backend import NativeKernels
from kernels.cpu.native.build import NotBuilt
from kernels.cpu.native.drawing import NativeDraws
from kernels.interface import Kernels, Quantization
from shared.errors import StartError
from shared.logs import get_logger

log = get_logger("kernels")

CPU_DTYPES = (torch.bfloat16, torch.float32)
GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KV_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
"""Values of `--kv-cache-dtype` that some back end has, beside auto."""


def select_kernels(
    device: torch.device, dtype: torch.dtype, quantization: Quantization | None = None
) -> Kernels:
    """The fastest back end for `device` that is right for `dtype` and keeps weights as asked.

    Raises: StartError if there is none.
    """
    if device.type == "cuda":
        if quantization is not None:
            raise StartError(
                f"--quantization {quantization}: a GPU's kernels multiply weights in their own "
                "dtype; leave it out, or choose --device cpu"
            )
        return _gpu_kernels(device, dtype)
    if device.type != "cpu":
        raise StartError(f"device {device}: there are kernels for cpu and cuda; choose one of them")
    if dtype not in CPU_DTYPES:
        raise StartError(
            f"--dtype {str(dtype).removeprefix('torch.')}: the CPU computes in bfloat16 or "
            "float32; choose one of them, or auto"
        )
    try:
        return NativeKernels(dtype, quantization=quantization)
    except NotBuilt as reason:
        if quantization is not None:
            raise StartError(
                f"--quantization {quantization}: the native kernels alone have it, and they are "
                f"not there ({reason}): install a C++ compiler (g++ or clang++) and run "
                "`python -m kernels.cpu.warm_up`, or leave it out"
            ) from reason
        log.warning("native_kernels_unavailable", why=str(reason), instead="numba's machine code")
    return CpuKernels(dtype)


def _gpu_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Triton is imported only here: a CPU needs none of it."""
    if not torch.cuda.is_available():
        raise StartError(f"--device cuda: torch {torch.__version__} sees no GPU; choose cpu")
    if dtype not in GPU_DTYPES:
        raise StartError(
            f"--dtype {str(dtype).removeprefix('torch.')}: a GPU computes in bfloat16, float16 or "
            "float32; choose one of them, or auto"
        )
    try:
        from kernels.triton_gpu.backend import Gpu, TritonKernels
    except ModuleNotFoundError as missing:
        raise StartError(
            f"--device cuda: its kernels need {missing.name}; pip install 'splitflap[gpu]'"
        ) from missing
    return TritonKernels(dtype, Gpu.of(device))


def interpreted_kernels(dtype: torch.dtype) -> Kernels:
    """A GPU's kernels, run on the CPU by Triton's interpreter: slow, for tests.

    Raises: StartError if there is no Triton.
    """
    os.environ["TRITON_INTERPRET"] = "1"  # read where Triton's kernels are defined
    try:
        from kernels.triton_gpu import repair
        from kernels.triton_gpu.backend import Gpu, TritonKernels
    except ModuleNotFoundError as missing:
        raise StartError(
            f"--device interpreter: needs {missing.name}; pip install 'splitflap[gpu]'"
        ) from missing
    repair.install()
    return TritonKernels(dtype, Gpu())


def select_draws() -> NativeDraws | None:
    """What draws tokens from logits in main memory faster than NumPy; None if nothing does."""
    try:
        return NativeDraws()
    except NotBuilt:  # which `select_kernels` tells of
        return None


def select_kv_dtype(kernels: Kernels, name: str) -> torch.dtype:
    """What `--kv-cache-dtype` `name` means for a back end; "auto" is the weights' own dtype.

    Raises: StartError with those that there are.
    """
    if name == "auto":
        return kernels.dtype
    dtype = KV_DTYPES.get(name)
    if dtype in kernels.kv_dtypes:
        return dtype
    known = [ours for ours, theirs in KV_DTYPES.items() if theirs in kernels.kv_dtypes]
    own = str(kernels.dtype).removeprefix("torch.")
    told = f"--kv-cache-dtype {name}: "
    if dtype is None or not isinstance(kernels, CpuKernels):
        raise StartError(
            f"{told}this device keeps keys and values in {' or '.join(('auto', *known))} "
            f"(auto: {own}, as the weights); choose one of them"
        )
    raise StartError(
        f"{told}without the native kernels the CPU keeps keys and values in {own} alone: install "
        "a C++ compiler (g++ or clang++) and run `python -m kernels.cpu.warm_up`, or choose auto"
    )


def default_dtype(device: torch.device) -> torch.dtype:
    """What `--dtype auto` means: bfloat16 where the device computes in it, else float32."""
    if device.type != "cpu" or has_fast_bf16():
        return torch.bfloat16
    return torch.float32
