"""Sliding windows: a query sees so many of the last keys, its own included, and no others."""

import pytest
import torch

from kernels.cpu.backend import CpuKernels
from kernels.interface import Kernels
from kernels.reference import ReferenceKernels, restored, stored
from tests.executor.model.teacher import Teacher, all_logits
from tests.executor.model.tiny import random_prompts
from tests.kernels.backends import KINDS, NATIVE
from tests.kernels.batches import Case, Drawn, dense_attention, draw, filled_pool
from tests.kernels.decoders import Sizes, random_decoder

ROWS = ((1, 1), (40, 3), (33, 33), (300, 1), (600, 70), (530, 1))
WINDOWS = (1, 5, 16, 100, 256, 257, 1000)
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2}


def error(kernels: Kernels, drawn: Drawn, window: int, kv_dtype: torch.dtype) -> float:
    """The largest one against dense attention over the numbers that the pool keeps."""
    pool = filled_pool(kernels, drawn, 1, kv_dtype=kv_dtype)
    got = kernels.paged_attention(pool, 1, drawn.queries, drawn.batch, 0.125, window)
    kept = Drawn(
        drawn.case, drawn.batch,
        [restored(stored(keys, kv_dtype)) for keys in drawn.keys],
        [restored(stored(values, kv_dtype)) for values in drawn.values],
        drawn.queries, drawn.num_blocks,
    )  # fmt: skip
    largest = (got.double() - dense_attention(kept, 0.125, window)).abs().max()
    return float(largest) if torch.isfinite(largest) else float("inf")


@pytest.mark.parametrize("window", [1, 5, 100])
def test_the_reference_sees_no_further(window: int) -> None:
    drawn = draw(Case(((1, 1), (40, 3), (130, 1))), torch.float64)
    assert error(ReferenceKernels(torch.float64), drawn, window, torch.float64) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("backend", NATIVE)
def test_a_mixed_batch_on_a_poisoned_pool(window: int, kind: str, backend: str) -> None:
    dtype, kv_dtype = KINDS[kind]
    for block_size in (16, 3):
        drawn = draw(Case(ROWS, block_size, seed=window), dtype)
        assert error(NATIVE[backend](dtype), drawn, window, kv_dtype) < TOLERANCE[dtype]


SIZES = Sizes(layers=3, windows=(7, None, 70))


@pytest.mark.parametrize("backend", NATIVE)
def test_each_layer_of_a_step_has_its_own(backend: str) -> None:
    prompts = random_prompts(117, 1, 9, 130)
    reference = random_decoder(ReferenceKernels(torch.float32), SIZES)
    model = random_decoder(NATIVE[backend](torch.float32), SIZES)
    full = random_decoder(NATIVE[backend](torch.float32), Sizes(layers=3))
    assert model.is_one_step
    got, wanted = all_logits(model, prompts), all_logits(reference, prompts)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=3e-4, rtol=1e-4)
    unlike = all_logits(full, prompts)[2]
    assert torch.allclose(unlike[:7], got[2][:7], atol=3e-4)
    assert not torch.allclose(unlike[7:], got[2][7:], atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 16, 100])
def test_the_same_bits_alone_in_any_chunks_and_among_others(chunk: int, kind: str) -> None:
    dtype, kv_dtype = KINDS[kind]
    model = random_decoder(NATIVE["native"](dtype), SIZES, kv_dtype)
    prompts = random_prompts(117, 530, 300, 45)
    wanted = [Teacher(model, [prompt], 16).step([0], [len(prompt)]) for prompt in prompts]
    teacher = Teacher(model, prompts, 16, seed=chunk)
    got = [torch.empty(0, 117) for _ in prompts]
    for start in range(0, 530, chunk):
        counts = [min(chunk, len(prompt) - start) for prompt in prompts]
        rows = [row for row, count in enumerate(counts) if count > 0]
        answers = teacher.step(rows, [counts[row] for row in rows])
        for row, part in zip(rows, answers.split([counts[r] for r in rows]), strict=True):
            got[row] = torch.cat((got[row], part))
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


def test_a_back_end_without_windows_says_so() -> None:
    kernels = CpuKernels(torch.float32)
    drawn = draw(Case(((20, 1),)), torch.float32)
    assert not kernels.has_windows
    with pytest.raises(ValueError, match="a window of 5 keys"):
        kernels.paged_attention(
            filled_pool(kernels, drawn, 0), 0, drawn.queries, drawn.batch, 1.0, 5
        )
