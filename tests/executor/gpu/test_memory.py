"""How much of a GPU the KV pool gets."""

import doctest

import pytest
import torch

from services.executor.gpu import decode_graphs
from services.executor.gpu.memory import CudaMemory, GpuMemory
from services.executor.sizing import PoolWishes, plan_pool
from shared.errors import StartError

GIB = 2**30
H200 = GpuMemory(total=140 * GIB, used=14 * GIB, step=1 * GIB, graphs=2 * GIB)


def test_the_pool_gets_what_weights_a_step_and_graphs_leave_of_the_share():
    assert H200.for_pool(0.9) == pytest.approx((126 - 17) * GIB, abs=1)
    assert H200.for_pool(0.5) == pytest.approx((70 - 17) * GIB, abs=1)


def test_a_share_that_leaves_nothing_is_refused_with_all_numbers():
    with pytest.raises(
        StartError, match=r"0\.1: of 140\.00 GiB .* 14\.00 GiB .* 2\.00 GiB"
    ) as told:
        H200.for_pool(0.1)
    assert "raise it" in str(told.value)


def test_a_gpus_pool_takes_it_all():
    available = 10 * GIB
    plan = plan_pool(PoolWishes(16, takes_all=True), 131_072, 4096, available)
    assert 0 <= available - plan.pool_bytes < plan.block_bytes
    capped = plan_pool(PoolWishes(16, memory_bytes=GIB, takes_all=True), 131_072, 4096, available)
    assert capped.pool_bytes == GIB


class MadeUp:
    """`torch.cuda`: of 100 bytes 20 are others'; torch has 10, and takes 7 more for some work."""

    def __init__(self):
        self.log, self.held, self.peak = [], 10, 90

    def mem_get_info(self, device):
        self.log.append("info")
        return 80 - self.held, 100

    def empty_cache(self):
        self.log.append("empty_cache")

    def synchronize(self, device):
        self.log.append("synchronize")

    def memory_allocated(self, device):
        return self.held

    def reset_peak_memory_stats(self, device):
        self.peak = self.held

    def max_memory_allocated(self, device):
        assert self.log[-1] == "synchronize"
        return self.peak

    def work(self):
        self.peak, self.held = self.held + 7, self.held + 2


def test_what_a_gpu_says_of_its_memory(monkeypatch):
    cuda = MadeUp()
    monkeypatch.setattr(torch, "cuda", cuda)
    memory = CudaMemory(torch.device("cuda"))
    assert memory.total_bytes == 100
    assert memory.free_bytes() == 70
    assert cuda.log[-3:] == ["synchronize", "empty_cache", "info"]
    assert memory.peak_bytes(cuda.work) == 7
    assert memory.free_bytes() == 68


def test_graphs_for_every_size_and_length():
    assert doctest.testmod(decode_graphs).failed == 0
    bounds = decode_graphs.all_bounds(decode_graphs.GRAPH_ROWS, 131_072)
    assert len(bounds) == len(set(bounds))
    assert {one.rows for one in bounds} == set(decode_graphs.GRAPH_ROWS)
    assert max(one.items for one in bounds) == decode_graphs.MOST_ITEMS
    assert decode_graphs.all_bounds((), 4096) == []


@pytest.mark.parametrize("longest", [300, 5000, 131_072, 1_000_000])
def test_a_row_of_any_length_has_a_graph(longest):
    """Up to MOST_ITEMS splits; and none is larger than the longest row needs."""
    splits = -(-longest // decode_graphs.SPLIT_TOKENS)
    bounds = decode_graphs.all_bounds(decode_graphs.GRAPH_ROWS, longest)
    assert max(one.items for one in bounds if one.rows == 1) == splits
    assert max(one.items // one.rows for one in bounds) == splits
