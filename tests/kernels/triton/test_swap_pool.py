"""Where swapped blocks lie: for a GPU in pinned memory, which alone it copies from by itself."""

import pytest
import torch

from kernels.interface import PoolSpec
from kernels.triton_gpu.backend import E4M3, Gpu, TritonKernels
from kernels.triton_gpu.blocks import Layout
from shared.geometry import ModelShape

pytestmark = pytest.mark.triton

SHAPE = ModelShape(2, 4, 2, 16, 64, 100, 4096)


@pytest.fixture
def asked(monkeypatch):
    """What torch's allocator is asked for, and given without a GPU: (device, is it pinned)."""
    empty, wishes = torch.empty, []

    def recorded(*size, dtype, device, pin_memory=False):
        wishes.append((torch.device(device).type, pin_memory))
        return empty(*size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", recorded)
    return wishes


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_a_gpus_is_pinned_and_of_whole_blocks_whatever_the_pools_layout(asked, layout, dtype):
    kernels = TritonKernels(torch.bfloat16, Gpu(), layout)
    spec = PoolSpec(SHAPE, 3, 16, dtype, torch.device("cuda"))
    pool = kernels.allocate_swap_pool(spec)
    assert asked == [("cpu", True)]
    assert pool.is_contiguous()
    kernels.allocate_pool(spec)
    assert asked[1:] == [("cuda", False)]


def test_where_there_is_no_gpu_it_is_not(asked):
    TritonKernels(torch.bfloat16, Gpu()).allocate_swap_pool(
        PoolSpec(SHAPE, 3, 16, torch.bfloat16, torch.device("cpu"))
    )
    assert asked == [("cpu", False)]
