"""Keys and values in 8 bits: every number of e4m3, by bits and by hardware."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.reference import ReferenceKernels
from kernels.triton_gpu.backend import Gpu, TritonKernels
from kernels.triton_gpu.device.e4m3 import decode, encode
from ops.gpu.ragged import (
    E4M3,
    TOLERANCE,
    Attention,
    error_of,
    kept,
    poisoned_pool,
)
from tests.kernels.batches import Case, draw

BITS, HARDWARE = Gpu(has_e4m3=False), Gpu(has_e4m3=True)
ROWS = ((1, 1), (70, 1), (300, 1), (90, 50))


@triton.jit
def decode_kernel(bits, out, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(out + places, decode(tl.load(bits + places)))


@triton.jit
def encode_kernel(x, out, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(out + places, encode(tl.load(x + places)))


def test_every_number_is_read_exactly() -> None:
    bits, out = torch.arange(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.float16)
    decode_kernel[(1,)](bits, out, 256)
    wanted = bits.view(E4M3).float()
    assert wanted.isnan().sum() == 2
    assert torch.equal(out.float().mul(256).nan_to_num(777), wanted.nan_to_num(777))


def test_numbers_are_written_to_the_nearest_ties_to_even() -> None:
    numbers = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    random = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    near_ties = (ties, ties.nextafter(numbers[1:]), ties.nextafter(numbers[:-1]))
    odd = torch.tensor([0.0, 447.9, 464.0, 1e30, float("inf"), float("nan")])
    x = torch.cat([numbers, *near_ties, random, 100 * random, random / 100, odd])
    x = torch.cat([x, -x])
    x = torch.cat([x, torch.zeros(2**15 - len(x))])
    out = torch.zeros(2**15, dtype=torch.uint8)
    encode_kernel[(1,)](x, out, 2**15)
    wanted = x.clamp(-448, 448).to(E4M3).view(torch.uint8)
    same = (out == wanted) | (x.isnan() & out.view(E4M3).isnan())
    assert same.all(), x[~same]


@pytest.mark.parametrize("gpu", [BITS, HARDWARE], ids=["bits", "hardware"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_over_scaled_keys_and_values(dtype: torch.dtype, gpu: Gpu) -> None:
    how = Attention(kv_dtype=E4M3, kv_scales=(0.037, 0.021), gpu=gpu)
    assert error_of(Case(ROWS, 16, 4, 2), dtype, how) < TOLERANCE[dtype]


@pytest.mark.parametrize("gpu", [BITS, HARDWARE], ids=["bits", "hardware"])
def test_keys_and_values_are_written_each_with_its_scale(gpu: Gpu) -> None:
    kernels = TritonKernels(torch.float16, gpu, kv_scales=(0.5, 0.02))
    drawn = draw(Case(((20, 1),), 16, 4, 2), torch.float16)
    pool, wanted = (poisoned_pool(kernels, drawn, E4M3) for _ in range(2))
    slots = torch.arange(16, 36)
    kernels.write_kv(pool, 1, drawn.keys[0], drawn.values[0], slots)
    keys, values = kept(drawn.keys[0], E4M3, 0.5), kept(drawn.values[0], E4M3, 0.02)
    ReferenceKernels(E4M3).write_kv(wanted, 1, keys, values, slots)
    assert torch.equal(pool.float().nan_to_num(777), wanted.float().nan_to_num(777))


@pytest.mark.parametrize("gpu", [BITS, HARDWARE], ids=["bits", "hardware"])
def test_together_with_a_window_and_a_cap(gpu: Gpu) -> None:
    how = Attention(40, 3.0, kv_dtype=E4M3, kv_scales=(0.5, 0.25), gpu=gpu)
    assert error_of(Case(ROWS, 8, 6, 2, 80), torch.float16, how) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("gpu", [BITS, HARDWARE], ids=["bits", "hardware"])
def test_nan_and_infinity_are_not_hidden_or_spread(gpu: Gpu) -> None:
    kernels = TritonKernels(torch.float16, gpu)
    drawn = draw(Case(((4, 1),), 16, 4, 2), torch.float16)
    pool = poisoned_pool(kernels, drawn, E4M3)
    keys = drawn.keys[0]
    keys[0], keys[1] = float("nan"), float("inf")
    kernels.write_kv(pool, 0, keys, -keys, torch.tensor([0, 1, 2, 3]))
    assert pool[0, 0, :, :, 0].float().isnan().all()
    assert (pool[0, 0, :, 0, 1].float() == 448).all()
    assert (pool[0, 0, :, 1, 1].float() == -448).all()
    assert torch.equal(pool[0, 0, :, 0, 2].float(), keys[2].float().to(E4M3).float())
