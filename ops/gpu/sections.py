"""A section, in the process it has to itself."""

import time
from importlib import import_module

import torch

from kernels.triton_gpu import repair
from kernels.triton_gpu.backend import Gpu
from ops.gpu.section import GpuLost, Section


def run(name: str, is_dry: bool, seconds: float, ceilings: dict[str, float]) -> None:
    """Run a section and print what it tells."""
    device = torch.device("cpu" if is_dry else "cuda")
    section = Section(device, Gpu(), is_dry, time.monotonic() + seconds, ceilings)
    if is_dry:
        repair.install()
    elif torch.cuda.is_available():
        torch.cuda.set_device(0)
        section.gpu = Gpu.of(device)
    else:
        section.fault(name, f"torch {torch.__version__} sees no GPU; --dry needs none")
        return
    try:
        with torch.inference_mode(), section.guarded(name):
            import_module(f"ops.gpu.{name}").run(section)
    except GpuLost as lost:
        section.fault(name, f"the GPU was lost at {lost}: the rest of the section was not run")
