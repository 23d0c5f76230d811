"""What this machine can do at most: copies on the device and across the bus, and products."""

from typing import Final

import torch

from ops.gpu.section import Section
from ops.gpu.timing import best_s, device_s

COPY: Final = "copy on the device"
TO_DEVICE: Final = "copy to the device"
FROM_DEVICE: Final = "copy from the device"
PRODUCT: Final = "product bfloat16"
_COPIES: Final = 4


def run(section: Section) -> None:
    """Measure them all."""
    with section.guarded("machine"):
        _machine(section)
    with section.guarded(COPY):
        _copies(section)
    with section.guarded("products"):
        _products(section)
    with section.guarded("bus"):
        _bus(section)


def _machine(section: Section) -> None:
    versions = f"torch {torch.__version__}, triton {_triton_version()}"
    if section.device.type != "cuda":
        section.row("a CPU, interpreting", torch.get_num_threads(), "threads", versions)
        return
    gpu = torch.cuda.get_device_properties(section.device)
    capability = f"{gpu.major}.{gpu.minor}"
    section.row(gpu.name, gpu.total_memory / 1e9, "GB", f"{capability}, {versions}")
    section.row("multiprocessors", gpu.multi_processor_count, "")
    section.row("shared memory a program", section.gpu.shared_bytes, "bytes")


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def _copies(section: Section) -> None:
    size = 2**16 if section.is_dry else _gib(section, 4)
    source = torch.ones(size, dtype=torch.uint8, device=section.device)
    target = torch.empty_like(source)
    each_s = device_s(section.device, lambda i: target.copy_(source), _COPIES)
    section.row(COPY, 2 * size / each_s / 1e9, "GB/s", "read and written")
    numbers = source.view(torch.float32)
    each_s = device_s(section.device, lambda i: torch.sum(numbers), _COPIES)
    section.row("sum on the device", size / each_s / 1e9, "GB/s", "read alone")


def _products(section: Section) -> None:
    side = 64 if section.is_dry else 8192
    for dtype in (torch.bfloat16, torch.float16):
        a, b = torch.randn(2, side, side, device=section.device).to(dtype)
        out = torch.empty_like(a)
        each_s = device_s(section.device, lambda i, a=a, b=b, out=out: torch.mm(a, b, out=out), 2)
        name = str(dtype).removeprefix("torch.")
        section.row(f"product {name}", 2 * side**3 / each_s / 1e12, "TFLOP/s", f"{side} cubed")


def _bus(section: Section) -> None:
    size = 2**16 if section.is_dry else 2**29
    there = torch.ones(size, dtype=torch.uint8, device=section.device)
    here = torch.ones(size, dtype=torch.uint8, pin_memory=section.device.type == "cuda")
    for name, target, source in ((TO_DEVICE, there, here), (FROM_DEVICE, here, there)):
        call_s = best_s(section.device, lambda t=target, s=source: t.copy_(s, non_blocking=True), 5)
        section.row(name, size / call_s / 1e9, "GB/s", "pinned, one copy")


def _gib(section: Section, wanted: int) -> int:
    """So many GiB, or an eighth of what is free."""
    free, _ = torch.cuda.mem_get_info(section.device)
    return min(wanted * 2**30, free // 8 // 2**20 * 2**20)
