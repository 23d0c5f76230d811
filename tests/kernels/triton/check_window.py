"""A sliding window: a query sees its last keys, its own included, and no other."""

import pytest
import torch

from ops.gpu.ragged import TOLERANCE, Attention, error_of
from tests.kernels.batches import Case

ROWS = ((1, 1), (70, 1), (300, 1), (600, 1), (90, 50), (33, 33))


@pytest.mark.parametrize("window", [1, 17, 64, 65, 256, 1000])
def test_windows(window: int) -> None:
    case = Case(ROWS, 16, 4, 2, seed=window)
    assert error_of(case, torch.float32, Attention(window)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("head_dim", [80, 128])
def test_with_other_heads(head_dim: int) -> None:
    case = Case(ROWS, 8, 3, 1, head_dim)
    assert error_of(case, torch.bfloat16, Attention(40)) < TOLERANCE[torch.bfloat16]
