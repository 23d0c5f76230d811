"""What launching costs: a kernel, and a decode step, one by one and as a CUDA graph."""

import time
from collections.abc import Callable
from typing import Final

import torch

from kernels.interface import PoolSpec
from kernels.triton_gpu import blocks
from kernels.triton_gpu.backend import TritonKernels
from ops.gpu.attention import Decode, launches_over
from ops.gpu.section import Section
from ops.gpu.timing import capture, clock_s, replay_s
from shared.geometry import ModelShape

_COUNT: Final = 200


def run(section: Section) -> None:
    """Of a write, of attention, and of a torch operation beside them."""
    count = 2 if section.is_dry else _COUNT
    for what, num_kernels, call in _calls(section):
        if section.has_time(what):
            with section.guarded(what):
                _measure(section, f"{what}, {num_kernels} kernels", call, count)


def _calls(section: Section) -> list[tuple[str, int, Callable[[], object]]]:
    some = Decode(batch=1, context=600, heads=4, kv_heads=2, head_dim=64)
    shape = ModelShape(1, 4, 2, 64, 64, 100, 4096)
    kernels = TritonKernels(torch.bfloat16, section.gpu)
    pool = kernels.allocate_pool(PoolSpec(shape, 4, 16, torch.bfloat16, section.device))
    heads = torch.randn(1, 2, 64, device=section.device).bfloat16()
    slots = torch.zeros(1, dtype=torch.int64, device=section.device)
    numbers = torch.ones(64, device=section.device)
    in_layer = launches_over(section, some)
    return [
        ("torch's addition", 1, lambda: numbers.add_(1)),
        ("write", 1, lambda: blocks.write(pool, 0, heads, heads, slots, (1.0, 1.0))),
        ("attention with a fold", 2, lambda: in_layer(0)),
    ]


def _measure(section: Section, what: str, call: Callable[[], object], count: int) -> None:
    def calls() -> None:
        for _ in range(count):
            call()

    call()
    both_s = clock_s(section.device, calls) / count
    began = time.perf_counter()
    calls()
    host_s = (time.perf_counter() - began) / count
    section.row(f"{what}: launched", 1e6 * host_s, "us", "of the host")
    section.row(f"{what}: one by one", 1e6 * both_s, "us", "until it is done")
    if section.device.type != "cuda":
        section.left_out(f"{what}: in a graph", "there are CUDA graphs only on a GPU")
        return
    graph = capture(calls)
    replay_s(graph)
    graph_s = min(replay_s(graph) for _ in range(5)) / count
    section.row(f"{what}: in a graph", 1e6 * graph_s, "us", f"{both_s / graph_s:.1f} times as fast")
