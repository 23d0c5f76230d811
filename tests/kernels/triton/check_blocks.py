"""Blocks: written by slot, copied within a pool, gathered for a swap and scattered after it."""

import pytest
import torch
from torch import Tensor

from kernels.interface import PoolSpec
from kernels.reference import ReferenceKernels
from kernels.triton_gpu import blocks
from kernels.triton_gpu.backend import Gpu, TritonKernels
from kernels.triton_gpu.blocks import Layout
from ops.gpu import ragged
from shared.geometry import ModelShape

CPU = torch.device("cpu")
LAYOUTS = list(Layout)
DTYPES = [torch.float16, torch.float32, ragged.E4M3]


def spec(dtype: torch.dtype, head_dim: int = 64) -> PoolSpec:
    return PoolSpec(ModelShape(3, 4, 2, head_dim, 64, 100, 4096), 12, 16, dtype, CPU)


def random_pool(layout: Layout, dtype: torch.dtype) -> Tensor:
    weights = torch.float16 if dtype == ragged.E4M3 else dtype
    pool = TritonKernels(weights, Gpu(), layout).allocate_pool(spec(dtype))
    random = torch.Generator().manual_seed(1)
    return pool.copy_(torch.randn(pool.shape, generator=random).to(dtype))


def bits(pool: Tensor) -> Tensor:
    return pool.contiguous().view(torch.uint8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 80, 40])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_keys_and_values_are_written_where_the_slots_say(
    dtype: torch.dtype, head_dim: int, layout: Layout
) -> None:
    slots = torch.tensor([5, 16 * 3 + 15, -1, 16 * 11, -7, 4])
    qkv = torch.randn(6, 8 * head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    heads = qkv.view(6, 8, head_dim)
    keys, values = heads[:, 4:6], heads[:, 6:]
    kernels, reference = TritonKernels(dtype, Gpu(), layout), ReferenceKernels(dtype)
    got = kernels.allocate_pool(spec(dtype, head_dim)).fill_(float("nan"))
    wanted = reference.allocate_pool(spec(dtype, head_dim)).fill_(float("nan"))
    kernels.write_kv(got, 1, keys, values, slots)
    is_kept = slots >= 0
    reference.write_kv(wanted, 1, keys[is_kept], values[is_kept], slots[is_kept])
    assert torch.equal(got.nan_to_num(9), wanted.nan_to_num(9))
    assert int((~wanted.isnan()).sum()) == 4 * 2 * 2 * head_dim


def test_rotated_keys_are_written_and_rotated_queries_returned() -> None:
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 8 * 64, generator=random)
    rotary = torch.randn(5, 64, generator=random)
    slots = torch.tensor([1, 2, 3, 40, 50])
    batch = type("Batch", (), {"slots": slots})()
    kernels, reference = TritonKernels(torch.float32, Gpu()), ReferenceKernels(torch.float32)
    got, wanted = (k.allocate_pool(spec(torch.float32)).zero_() for k in (kernels, reference))
    queries = kernels.rotate_and_write(got, 2, qkv, rotary, batch)
    assert torch.equal(queries, reference.rotate_and_write(wanted, 2, qkv, rotary, batch))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_on_write(dtype: torch.dtype, layout: Layout) -> None:
    pool = random_pool(layout, dtype)
    wanted = pool.clone()
    pairs = torch.tensor([[1, 5], [1, 6], [3, 9]])
    wanted[[5, 6, 9]] = pool[[1, 1, 3]]
    TritonKernels(torch.float16, Gpu(), layout).copy_blocks(pool, pool, pairs)
    assert torch.equal(bits(pool), bits(wanted))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_and_in_again_through_one_staging_copy(dtype: torch.dtype, layout: Layout) -> None:
    pool = random_pool(layout, dtype)
    staging = blocks.gather(pool, torch.tensor([7, 2, 10]))
    assert staging.is_contiguous()
    assert torch.equal(bits(staging), bits(pool[[7, 2, 10]]))
    wanted = pool.clone()
    wanted[[0, 4, 11]] = pool[[7, 2, 10]]
    blocks.scatter(staging, pool, torch.tensor([0, 4, 11]))
    assert torch.equal(bits(pool), bits(wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_swap_out_and_in(dtype: torch.dtype) -> None:
    pool, aside = (random_pool(Layout.BLOCK_MAJOR, dtype) for _ in range(2))
    wanted = pool.clone()
    wanted[[4, 11]] = pool[[7, 2]]
    blocks.swap_out(pool, aside, torch.tensor([[7, 3], [2, 5]]))
    assert torch.equal(bits(aside[[3, 5]]), bits(pool[[7, 2]]))
    blocks.swap_in(aside, pool, torch.tensor([[3, 4], [5, 11]]))
    assert torch.equal(bits(pool), bits(wanted))


def test_what_the_kernels_cannot_read_is_not_allocated() -> None:
    kernels = TritonKernels(torch.float16, Gpu())
    assert kernels.kv_dtypes == (torch.float16, ragged.E4M3)
    for allocate in (kernels.allocate_pool, kernels.allocate_swap_pool):
        with pytest.raises(ValueError, match=r"a pool of torch\.int8"):
            allocate(spec(torch.int8))


def test_a_bfloat16_pool_under_float16_is_refused() -> None:
    """It would keep 65,504, float16's greatest, as 65,536, which float16 has not."""
    greatest = torch.tensor(torch.finfo(torch.float16).max)
    assert greatest.bfloat16().half().isinf()
    kernels = TritonKernels(torch.float16, Gpu())
    with pytest.raises(ValueError, match=r"a pool of torch\.bfloat16: these kernels store"):
        kernels.allocate_pool(spec(torch.bfloat16))
    for wider in (torch.float32, torch.bfloat16):
        assert torch.bfloat16 in TritonKernels(wider, Gpu()).kv_dtypes


def test_nothing_to_do_launches_nothing() -> None:
    kernels = TritonKernels(torch.float16, Gpu())
    pool = random_pool(Layout.BLOCK_MAJOR, torch.float16)
    before = pool.clone()
    kernels.copy_blocks(pool, pool, torch.zeros(0, 2, dtype=torch.int64))
    none = torch.zeros(0, 2, 64, dtype=torch.float16)
    kernels.write_kv(pool, 0, none, none, torch.zeros(0, dtype=torch.int64))
    assert torch.equal(pool, before)
