"""A section, in the process it has to itself."""

import time
from importlib import import_module

import torch

from kernels.triton_gpu.backend import Gpu
from ops.gpu.section import GpuLost, Section


def run(name: str, is_dry: bool, seconds: float, ceilings: dict[str, float]) -> int:
    """Run a section and print what it tells. Returns: the exit status, 1 if it broke off."""
    if is_dry:
        device, gpu = torch.device("cpu"), Gpu()
        if name != "budgets":
            from kernels.triton_gpu import repair

            repair.install()
    else:
        device = torch.device("cuda")
        if not torch.cuda.is_available():
            print_fault = Section(device, Gpu(), is_dry, 0.0)
            print_fault.fault(name, f"torch {torch.__version__} sees no GPU; --dry needs none")
            return 0
        gpu = Gpu.of(device)
        torch.cuda.set_device(0)
    section = Section(device, gpu, is_dry, time.monotonic() + seconds, ceilings)
    module = import_module(f"ops.gpu.{name}")
    try:
        with torch.inference_mode(), section.guarded(name):
            module.run(section)
    except GpuLost:
        return 1
    return 0
