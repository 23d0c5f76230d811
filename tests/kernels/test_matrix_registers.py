"""Products by matrix registers: the same however they are cut, and what the instructions do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cpu.native import library
from kernels.interface import Kernels
from kernels.reference import ReferenceKernels
from tests.executor.model.teacher import Teacher, all_logits
from tests.executor.model.tiny import random_prompts
from tests.kernels.backends import (
    NATIVE,
    PLAIN_FLAGS,
    VECTOR_FLAGS,
    library_with,
    native_with,
)
from tests.kernels.decoders import Sizes, random_decoder

plain = native_with(PLAIN_FLAGS)
ROWS = (1, 3, 15, 16, 17, 31, 32, 33, 70)
SHAPES = ((64, 576), (70, 72), (33, 100), (100, 1536), (32, 30), (16, 2), (5, 34))
"""Outputs, inputs: whole registers of 32 inputs, some left over, and nothing but those."""


def numbers(*shape: int) -> Tensor:
    """Random ones of many sizes, the same each time."""
    random = torch.Generator().manual_seed(shape[0])
    return (
        torch.randn(shape, generator=random) * torch.randn(shape, generator=random).exp()
    ).bfloat16()


def logits(kernels: Callable[..., Kernels], x: Tensor, weight: Tensor) -> Tensor:
    """Products that are not rounded."""
    return kernels(torch.bfloat16).pack_vocabulary(weight).logits(x)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_the_same_in_any_company(shape: tuple[int, int]) -> None:
    weight, x = numbers(*shape), numbers(max(ROWS), shape[1])
    alone = torch.cat([logits(plain, x[i : i + 1], weight) for i in range(len(x))])
    exact = x.double() @ weight.double().T
    assert ((alone - exact).norm() / exact.norm()).item() < 1e-6
    for count in ROWS:
        assert torch.equal(logits(plain, x[:count], weight), alone[:count])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_registers_do_what_this_cpus_do(shape: tuple[int, int]) -> None:
    """Where it has none: what its vectors do, but for the order of sums."""
    weight, x = numbers(*shape), numbers(40, shape[1])
    tiny = x * 1e-38  # whose products are no normal numbers
    for inputs in (x, tiny):
        ours, theirs = logits(plain, inputs, weight), logits(NATIVE["native"], inputs, weight)
        if library.native().splitflap_has_matrices():
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, atol=1e-36, rtol=1e-3)


def test_a_step_on_plain_registers_is_near_float32_and_the_same_in_chunks() -> None:
    sizes = Sizes(heads=20, kv_heads=1, head_dim=72, hidden=96, inner=160)  # two registers of rows
    model = random_decoder(plain(torch.bfloat16), sizes)
    prompts = random_prompts(sizes.vocab, 60, 270)
    exact = all_logits(random_decoder(ReferenceKernels(torch.float32), sizes), prompts)
    for prompt, wanted in zip(prompts, exact, strict=True):
        whole = Teacher(model, [prompt], 16).step([0], [len(prompt)])
        assert ((whole - wanted).norm() / wanted.norm()).item() < 0.05
        for chunk, block_size in ((5, 16), (64, 3)):
            teacher = Teacher(model, [prompt], block_size, seed=chunk)
            pieces = [min(chunk, len(prompt) - at) for at in range(0, len(prompt), chunk)]
            assert torch.equal(torch.cat([teacher.step([0], [n]) for n in pieces]), whole)


def test_vectors_do_it_where_registers_are_not_built() -> None:
    vectors = native_with(VECTOR_FLAGS)
    assert not library_with(VECTOR_FLAGS).splitflap_has_matrices()
    for shape in SHAPES:
        weight, x = numbers(*shape), numbers(max(ROWS), shape[1])
        whole, exact = logits(vectors, x, weight), x.double() @ weight.double().T
        assert ((whole - exact).norm() / exact.norm()).item() < 1e-6
        assert torch.equal(
            torch.cat([logits(vectors, x[i : i + 1], weight) for i in range(70)]), whole
        )


def test_plain_registers_are_used_where_they_are_built() -> None:
    is_wide = library.native().splitflap_lanes() == 16
    assert bool(library_with(PLAIN_FLAGS).splitflap_has_matrices()) == is_wide
