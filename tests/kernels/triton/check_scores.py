"""What is done to scores: ALiBi's slopes, and a soft cap."""

import pytest
import torch

from kernels.triton_gpu.backend import Gpu, TritonKernels
from ops.gpu.ragged import (
    TOLERANCE,
    Attention,
    answer,
    error_of,
    poisoned_pool,
    write_all,
)
from tests.kernels.batches import Case, draw

ROWS = ((1, 1), (70, 1), (300, 1), (90, 50), (33, 33))


def slopes_of(heads: int) -> torch.Tensor:
    return 2.0 ** -torch.arange(1, heads + 1).float()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (5, 1)])
def test_alibi(heads: int, kv_heads: int) -> None:
    how = Attention(slopes=slopes_of(heads))
    assert error_of(Case(ROWS, 16, heads, kv_heads), torch.float32, how) < 2e-5


@pytest.mark.parametrize("soft_cap", [0.5, 3.0, 50.0])
def test_a_soft_cap(soft_cap: float) -> None:
    how = Attention(soft_cap=soft_cap)
    assert error_of(Case(ROWS, 16, 4, 2), torch.float32, how) < 2e-5


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_all_at_once(dtype: torch.dtype) -> None:
    how = Attention(window=40, soft_cap=3.0, slopes=slopes_of(6))
    assert error_of(Case(ROWS, 16, 6, 2, 80), dtype, how) < TOLERANCE[dtype]


def test_scores_far_above_the_cap_stay_finite() -> None:
    kernels = TritonKernels(torch.float32, Gpu())
    drawn = draw(Case(ROWS, 16, 4, 2), torch.float32)
    drawn.queries.mul_(1e5)
    pool = poisoned_pool(kernels, drawn, torch.float32)
    write_all(pool, drawn)
    assert answer(kernels, pool, drawn, Attention(soft_cap=1.0)).isfinite().all()
