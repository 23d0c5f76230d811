"""Pools that store less than is computed in: int8 with a scale a vector, bfloat16 under float32."""

import pytest
import torch

from kernels.cpu.native.backend import NativeKernels
from kernels.interface import Kernels, PoolSpec, token_bytes
from kernels.reference import ReferenceKernels, restored, stored
from kernels.select import select_kv_dtype
from shared.errors import StartError
from shared.geometry import ModelShape
from tests.executor.model.teacher import all_logits
from tests.executor.model.tiny import random_prompts
from tests.kernels.backends import BACKENDS, KINDS, NATIVE
from tests.kernels.batches import HEADS_OF, Case, Drawn, dense_attention, draw, filled_pool
from tests.kernels.decoders import Sizes, random_decoder
from tests.kernels.test_attention import BLOCK_SIZES, MIXED

SMALLER = {name: kind for name, kind in KINDS.items() if kind[0] != kind[1]}
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2}
SMOLLM2 = ModelShape(30, 9, 3, 64, 576, 49152, 8192)


# --------------------------------------------------------------------------- what int8 is


def test_a_vector_is_eight_bits_a_number_and_its_own_scale() -> None:
    vector = torch.tensor([0.0, 127.0, -127.0, 63.4, 0.5, 1.5, 2.5, -1.0])
    kept = stored(vector, torch.int8)
    assert kept[:8].tolist() == [0, 127, -127, 63, 0, 2, 2, -1]  # ties to even
    assert kept[8:].view(torch.bfloat16).tolist() == [1.0]
    assert restored(kept).tolist() == [0, 127, -127, 63, 0, 2, 2, -1]


def test_a_scale_is_never_too_small_and_hardly_too_large() -> None:
    vectors = torch.randn(1000, 64) * torch.logspace(-30, 30, 1000)[:, None]
    kept = stored(vectors, torch.int8)
    scale = kept[:, 64:].contiguous().view(torch.bfloat16).float()
    exact = vectors.abs().amax(1, keepdim=True) / 127
    assert (scale >= exact).all()
    assert (scale <= exact * (1 + 2**-7)).all()
    assert ((restored(kept) - vectors).abs() <= scale * 0.501).all()


def test_zeros_are_exact_and_what_is_no_number_stays_none() -> None:
    assert restored(stored(torch.zeros(3, 8), torch.int8)).tolist() == torch.zeros(3, 8).tolist()
    wild = torch.ones(3, 8)
    wild[0, 3], wild[1, 7] = torch.nan, -torch.inf
    back = restored(stored(wild, torch.int8))
    assert back[:2].isnan().all()
    assert back[2].isfinite().all()


# --------------------------------------------------------------------------- its bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 136])
@pytest.mark.parametrize("backend", NATIVE)
def test_native_bytes_are_the_reference_s(
    head_dim: int, block_size: int, dtype: torch.dtype, backend: str
) -> None:
    drawn = draw(Case(((20, 20), (37, 1), (50, 11)), block_size, head_dim=head_dim), dtype)
    drawn.keys[0][:2], drawn.values[1][3, 1] = 0, 0
    drawn.keys[1][7, 2, 5], drawn.values[2][9, 0, 0] = torch.nan, torch.inf
    drawn.keys[2][4] *= 1e-38
    pools = [
        filled_pool(kernels, drawn, 1, is_poisoned=False, kv_dtype=torch.int8)
        for kernels in (NATIVE[backend](dtype), ReferenceKernels(dtype))
    ]
    numbers, scales = as_reference(pools[0], head_dim, 2 if dtype == torch.bfloat16 else 1)
    assert torch.equal(scales, pools[1][..., head_dim:].contiguous().view(torch.int16)[..., 0])
    has_number = ~scales.view(torch.bfloat16).isnan()
    assert torch.equal(numbers[has_number], pools[1][..., :head_dim][has_number])
    assert has_number.logical_not().sum() == 2


def as_reference(
    pool: torch.Tensor, head_dim: int, together: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A native int8 pool's numbers in the reference's order, and the bits of its scales."""
    block_size = pool.shape[4] // (head_dim + 2)
    halves, scales = pool.split([block_size * head_dim, block_size * 2], dim=-1)
    keys, values = halves.unbind(3)
    keys = keys.unflatten(3, (head_dim // together, block_size, together))
    keys = keys.transpose(3, 4).flatten(4)
    if block_size % together == 0:
        values = values.unflatten(3, (block_size // together, head_dim, together))
        values = values.transpose(4, 5).flatten(3, 4)
    else:
        values = values.unflatten(3, (block_size, head_dim))
    return torch.stack((keys, values), dim=3), scales.contiguous().view(torch.int16)


def test_int8_is_about_half_of_bfloat16() -> None:
    sizes = {dtype: token_bytes(SMOLLM2, dtype) for dtype in (torch.bfloat16, torch.int8)}
    assert sizes == {torch.bfloat16: 23_040, torch.int8: 11_880}  # 1.94 times the tokens
    spec = PoolSpec(SMOLLM2, 3, 16, torch.int8, torch.device("cpu"))
    for kernels in (NativeKernels(torch.bfloat16), ReferenceKernels(torch.bfloat16)):
        pool = kernels.allocate_pool(spec)
        assert pool.numel() * pool.itemsize == 3 * spec.block_bytes == 3 * 16 * 11_880


# --------------------------------------------------------------------------- attention


def difference(kernels: Kernels, drawn: Drawn, kv_dtype: torch.dtype) -> float:
    """The largest one from the reference, in float64, over a pool of the same numbers."""
    scale, layer = drawn.case.head_dim**-0.5, drawn.case.num_layers - 1
    pool = filled_pool(kernels, drawn, layer, kv_dtype=kv_dtype)
    got = kernels.paged_attention(pool, layer, drawn.queries, drawn.batch, scale)
    kept = Drawn(
        drawn.case, drawn.batch,
        [restored(stored(keys, kv_dtype)) for keys in drawn.keys],
        [restored(stored(values, kv_dtype)) for values in drawn.values],
        drawn.queries, drawn.num_blocks,
    )  # fmt: skip
    error = (got.double() - dense_attention(kept, scale)).abs().max()
    return float(error) if torch.isfinite(error) else float("inf")


def test_the_reference_attends_to_what_it_stored() -> None:
    drawn = draw(Case(((1, 1), (17, 1), (9, 9), (40, 3)), 3), torch.float32)
    assert difference(ReferenceKernels(torch.float32), drawn, torch.int8) < 1e-5


@pytest.mark.parametrize("kind", SMALLER)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("backend", NATIVE)
def test_a_mixed_batch_on_a_poisoned_pool(block_size: int, kind: str, backend: str) -> None:
    dtype, kv_dtype = SMALLER[kind]
    drawn = draw(Case(MIXED, block_size, seed=block_size), dtype)
    assert difference(NATIVE[backend](dtype), drawn, kv_dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", SMALLER)
@pytest.mark.parametrize("heads", HEADS_OF)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 128])
@pytest.mark.parametrize("backend", NATIVE)
def test_any_heads_and_head_size(heads: str, head_dim: int, kind: str, backend: str) -> None:
    (dtype, kv_dtype), (num, kv) = SMALLER[kind], HEADS_OF[heads]
    drawn = draw(Case(((3, 3), (50, 1), (290, 6)), 16, num, kv, head_dim), dtype)
    assert difference(NATIVE[backend](dtype), drawn, kv_dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", NATIVE)
def test_tokens_of_very_different_size_have_scales_of_their_own(backend: str) -> None:
    """With a scale a block, or one that only grows, the small ones would be gone."""
    drawn = draw(Case(((64, 1), (300, 4))), torch.float32)
    for keys, values in zip(drawn.keys, drawn.values, strict=True):
        keys *= torch.logspace(-3, 0, len(keys))[torch.randperm(len(keys))][:, None, None]
        values *= torch.logspace(-6, 0, len(values))[:, None, None]
    kernels = NATIVE[backend](torch.float32)
    assert difference(kernels, drawn, torch.int8) < 1e-5
    pool = filled_pool(kernels, drawn, 1, kv_dtype=torch.int8)
    got = kernels.paged_attention(pool, 1, drawn.queries, drawn.batch, 0.125)
    assert (got.double() - dense_attention(drawn, 0.125)).abs().max() < 5e-3


@pytest.mark.parametrize("backend", NATIVE)
def test_a_step_over_int8_equals_the_reference(backend: str) -> None:
    prompts = random_prompts(117, 1, 7, 40, 90)
    reference = random_decoder(ReferenceKernels(torch.float32), Sizes(), torch.int8)
    model = random_decoder(NATIVE[backend](torch.float32), Sizes(), torch.int8)
    assert model.is_one_step
    assert model.kv_dtype == "int8"
    for got, wanted in zip(all_logits(model, prompts), all_logits(reference, prompts), strict=True):
        # A rounding that falls the other way is one step of one number.
        assert (got - wanted).norm() / wanted.norm() < 5e-3


@pytest.mark.parametrize("kind", SMALLER)
def test_a_copied_block_brings_its_scales(kind: str) -> None:
    dtype, kv_dtype = SMALLER[kind]
    kernels = NativeKernels(dtype)
    drawn = draw(Case(((48, 1),)), dtype)
    pool = filled_pool(kernels, drawn, 1, kv_dtype=kv_dtype)
    wanted = kernels.paged_attention(pool, 1, drawn.queries, drawn.batch, 0.125)
    table = drawn.batch.block_tables[0, :3].tolist()
    free = [block for block in range(drawn.num_blocks) if block not in table]
    swap = torch.zeros_like(pool)
    kernels.copy_blocks(pool, swap, torch.tensor([[table[1], 0]]))
    pool[table[1]] = 1
    kernels.copy_blocks(swap, pool, torch.tensor([[0, free[0]]]))
    drawn.batch.block_tables[0, 1] = free[0]
    assert torch.equal(kernels.paged_attention(pool, 1, drawn.queries, drawn.batch, 0.125), wanted)


# --------------------------------------------------------------------------- what is asked for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_names_of_dtypes(dtype: torch.dtype) -> None:
    kernels = NativeKernels(dtype)
    assert select_kv_dtype(kernels, "auto") == dtype
    assert select_kv_dtype(kernels, "bf16") == torch.bfloat16
    assert select_kv_dtype(kernels, "int8") == torch.int8


def test_what_no_cpu_has_is_refused_with_what_it_has() -> None:
    with pytest.raises(StartError, match=r"fp8_e4m3: this device .* auto or bf16 or int8"):
        select_kv_dtype(NativeKernels(torch.float32), "fp8_e4m3")


def test_without_a_compiler_int8_is_refused_with_what_to_install() -> None:
    kernels = BACKENDS["numba"](torch.float32)
    assert select_kv_dtype(kernels, "auto") == torch.float32
    for name in ("int8", "bf16"):
        with pytest.raises(StartError, match=rf"{name}: .*float32 alone: install a C\+\+ compiler"):
            select_kv_dtype(kernels, name)
