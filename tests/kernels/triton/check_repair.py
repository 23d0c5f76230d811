"""The interpreter is still wrong without its repairs, and right with them."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.triton_gpu import repair

FAULTY_INDEX = triton.__version__.startswith("3.6") and np.lib.NumpyVersion(
    np.__version__
) >= np.lib.NumpyVersion("2.4.0")


@triton.jit
def product_kernel(a, b, out, N: tl.constexpr):
    places = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + places, tl.dot(tl.load(a + places), tl.load(b + places)))


@triton.jit
def convert_kernel(x, out, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(out + places, tl.load(x + places).to(out.dtype.element_ty))


@triton.jit
def count_kernel(bound, out):
    total = 0
    for _ in range(tl.load(bound)):
        total += 1
    tl.store(out, total)


def product_error() -> float:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.zeros(16, 16)
    product_kernel[(1,)](a, b, out, 16)
    return float((out.double() - a.double() @ b.double()).abs().max())


def num_converted_wrongly(dtype: torch.dtype) -> int:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 40
    out = torch.zeros(4096, dtype=dtype)
    convert_kernel[(1,)](x, out, 4096)
    return int((out.float() != x.to(dtype).float()).sum())


def test_products_of_bfloat16() -> None:
    assert product_error() < 1e-5
    with repair.undone():
        assert not product_error() < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_rounding(dtype: torch.dtype) -> None:
    assert num_converted_wrongly(dtype) == 0
    with repair.undone():
        assert num_converted_wrongly(dtype) > 50


def test_loops_over_what_was_loaded() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    count_kernel[(1,)](torch.tensor([5], dtype=torch.int32), out)
    assert out.tolist() == [5]
    if FAULTY_INDEX:
        with repair.undone(), pytest.raises(Exception, match="0-dimensional"):
            count_kernel[(1,)](torch.tensor([5], dtype=torch.int32), out)
