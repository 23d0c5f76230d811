"""Paged attention: any head size, heads, block size, dtype and layout, decode and prefill mixed."""

import pytest
import torch

from kernels.triton_gpu.backend import Gpu, TritonKernels
from kernels.triton_gpu.blocks import Layout
from kernels.triton_gpu.tiles import SHARED_H100
from ops.gpu.ragged import (
    TOLERANCE,
    Attention,
    answer,
    error_of,
    poisoned_pool,
    write_all,
)
from tests.kernels.batches import Case, draw

MIXED = ((1, 1), (5, 5), (270, 1), (40, 3), (37, 20))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    case = Case(MIXED, 16, 4, 2, head_dim, seed=head_dim)
    assert error_of(case, dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [1, 3, 8, 32, 128])
def test_block_sizes(block_size: int) -> None:
    case = Case(MIXED, block_size, 4, 2, seed=block_size)
    assert error_of(case, torch.float16) < TOLERANCE[torch.float16]


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (5, 1), (71, 1)])
def test_heads(heads: int, kv_heads: int) -> None:
    case = Case(((30, 1), (300, 1), (40, 9)), 16, heads, kv_heads, seed=heads)
    assert error_of(case, torch.float16) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("length", [255, 256, 257, 513])
def test_a_long_context_is_split_and_folded(length: int) -> None:
    case = Case(((length, 1), (length, 2)), 16, 4, 2, seed=length)
    assert error_of(case, torch.float32) < TOLERANCE[torch.float32]


def test_layer_major_pools() -> None:
    how = Attention(layout=Layout.LAYER_MAJOR)
    assert error_of(Case(MIXED, 16, 4, 2), torch.float16, how) < TOLERANCE[torch.float16]


def test_a_pool_of_less_precision_than_the_queries() -> None:
    how = Attention(kv_dtype=torch.bfloat16)
    assert error_of(Case(MIXED, 16, 4, 2), torch.float32, how) < TOLERANCE[torch.float32]


def test_wide_tiles_of_prefill() -> None:
    how = Attention(gpu=Gpu(SHARED_H100))
    case = Case(((200, 150), (70, 66)), 16, 4, 2, 128)
    assert error_of(case, torch.bfloat16, how) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    rows = []
    for _ in range(number(1, 6)):
        length = number(1, 400)
        rows.append((length, 1 if number(0, 2) else number(1, min(100, length) + 1)))
    case = Case(tuple(rows), (1, 3, 8, 16, 32)[number(0, 5)], 4, 2, seed=seed)
    print(f"seed {seed}: {case}")
    assert error_of(case, torch.float16) < TOLERANCE[torch.float16]


def test_nan_in_a_query_stays_with_its_row() -> None:
    kernels, drawn = (
        TritonKernels(torch.float16, Gpu()),
        draw(Case(((20, 1), (30, 1), (9, 4)), 16, 4, 2), torch.float16),
    )
    pool = poisoned_pool(kernels, drawn, torch.float16)
    write_all(pool, drawn)
    drawn.queries[0] = drawn.queries[3] = float("nan")
    attended = answer(kernels, pool, drawn)
    assert attended[[0, 3]].isnan().all()
    assert attended[[1, 2, 4, 5]].isfinite().all()


def test_a_model_of_other_heads_is_refused() -> None:
    kernels = TritonKernels(torch.float16, Gpu())
    drawn = draw(Case(((20, 1),), 16, 6, 2), torch.float16)
    pool = poisoned_pool(kernels, drawn, torch.float16)
    with pytest.raises(ValueError, match="2 key-value heads do not divide 5 query heads"):
        kernels.paged_attention(pool, 0, drawn.queries[:, :5], drawn.batch, 1.0)
