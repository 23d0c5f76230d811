"""Paged attention of both back ends against dense attention in float64."""

import pytest
import torch

from kernels.interface import Kernels
from kernels.reference import ReferenceKernels
from tests.kernels.backends import BACKENDS
from tests.kernels.batches import HEADS_OF, Case, Drawn, dense_attention, draw, filled_pool

MIXED = ((1, 1), (5, 5), (17, 1), (40, 3), (33, 33), (300, 1), (130, 7), (16, 16), (64, 1))
BLOCK_SIZES = (1, 3, 8, 16, 32)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}


def largest_error(kernels: Kernels, drawn: Drawn, *, is_poisoned: bool = True) -> float:
    scale = drawn.case.head_dim**-0.5
    layer = drawn.case.num_layers - 1
    pool = filled_pool(kernels, drawn, layer, is_poisoned=is_poisoned)
    got = kernels.paged_attention(pool, layer, drawn.queries, drawn.batch, scale)
    assert got.shape == drawn.queries.shape
    assert got.dtype == drawn.queries.dtype
    error = (got.double() - dense_attention(drawn, scale)).abs().max()
    return float(error) if torch.isfinite(error) else float("inf")


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_reference_equals_dense_attention(block_size: int) -> None:
    small = ((1, 1), (17, 1), (9, 9), (40, 3))
    drawn = draw(Case(small, block_size, seed=block_size), torch.float64)
    assert largest_error(ReferenceKernels(torch.float64), drawn) < 1e-12


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mixed_batch_on_a_poisoned_pool(
    block_size: int, dtype: torch.dtype, backend: str
) -> None:
    drawn = draw(Case(MIXED, block_size, seed=block_size), dtype)
    assert largest_error(BACKENDS[backend](dtype), drawn) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", HEADS_OF)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_heads_and_head_size(
    heads: str, head_dim: int, dtype: torch.dtype, backend: str
) -> None:
    num, kv = HEADS_OF[heads]
    drawn = draw(Case(((3, 3), (50, 1), (29, 6)), 16, num, kv, head_dim), dtype)
    assert largest_error(BACKENDS[backend](dtype), drawn) < TOLERANCE[dtype]


@pytest.mark.parametrize("length", [255, 256, 257, 511, 513, 1500])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_context_is_cut_and_merged(length: int, backend: str) -> None:
    drawn = draw(Case(((length, 1), (length, 2)), seed=length), torch.float32)
    assert largest_error(BACKENDS[backend](torch.float32), drawn) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_batches(seed: int, backend: str) -> None:
    random = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    rows = []
    for _ in range(number(1, 12)):
        length = number(1, 400)
        rows.append((length, 1 if number(0, 2) else number(1, length + 1)))
    case = Case(tuple(rows), BLOCK_SIZES[number(0, 5)], seed=seed)
    print(f"seed {seed}: {case}")
    for dtype, tolerance in TOLERANCE.items():
        assert largest_error(BACKENDS[backend](dtype), draw(case, dtype)) < tolerance


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_depend_on_their_batch_mates(backend: str) -> None:
    kernels, dtype = BACKENDS[backend](torch.bfloat16), torch.bfloat16
    drawn = draw(Case(((700, 1), (300, 1), (40, 40), (5, 1))), dtype)
    pool = filled_pool(kernels, drawn, 0)
    together = kernels.paged_attention(pool, 0, drawn.queries, drawn.batch, 0.125)
    for row in range(4):
        alone = one_row(drawn, row)
        got = kernels.paged_attention(pool, 0, alone.queries, alone.batch, 0.125)
        start, end = drawn.batch.row_starts[row], drawn.batch.row_starts[row + 1]
        assert torch.equal(got, together[start:end])


def one_row(drawn: Drawn, row: int) -> Drawn:
    """The same sequence in a batch of its own."""
    batch = drawn.batch
    start, end = int(batch.row_starts[row]), int(batch.row_starts[row + 1])
    only = type(batch)(
        token_ids=batch.token_ids[start:end],
        positions=batch.positions[start:end],
        slots=batch.slots[start:end],
        row_starts=torch.tensor([0, end - start], dtype=torch.int32),
        context_lengths=batch.context_lengths[row : row + 1],
        block_tables=batch.block_tables[row : row + 1],
        logit_tokens=torch.tensor([end - start - 1]),
    )
    return Drawn(
        drawn.case,
        only,
        drawn.keys[row : row + 1],
        drawn.values[row : row + 1],
        drawn.queries[start:end],
        drawn.num_blocks,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_on_one_thread_and_on_many(backend: str) -> None:
    kernels = BACKENDS[backend](torch.float32)
    drawn = draw(Case(MIXED), torch.float32)
    pool = filled_pool(kernels, drawn, 0)
    before = torch.get_num_threads()
    answers = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            answers.append(kernels.paged_attention(pool, 0, drawn.queries, drawn.batch, 0.125))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_query_stays_with_its_row(backend: str) -> None:
    kernels = BACKENDS[backend](torch.bfloat16)
    drawn = draw(Case(((20, 1), (30, 1))), torch.bfloat16)
    pool = filled_pool(kernels, drawn, 0)
    drawn.queries[0] = float("nan")
    attended = kernels.paged_attention(pool, 0, drawn.queries, drawn.batch, 0.125)
    assert attended[0].isnan().all()
    assert attended[1].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_far_apart_do_not_overflow(backend: str) -> None:
    kernels = BACKENDS[backend](torch.float32)
    drawn = draw(Case(((300, 1), (300, 20))), torch.float32)
    drawn.queries.mul_(200.0)
    assert largest_error(kernels, drawn) < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_compiled_code_cannot_read_is_refused(backend: str) -> None:
    kernels = BACKENDS[backend](torch.float32)
    drawn = draw(Case(((20, 1),)), torch.float32)
    pool = filled_pool(kernels, drawn, 0)
    with pytest.raises(ValueError, match="do not divide"):
        kernels.paged_attention(pool, 0, drawn.queries[:, :8].contiguous(), drawn.batch, 1.0)
    with pytest.raises(ValueError, match="bfloat16"):
        kernels.paged_attention(pool, 0, drawn.queries.bfloat16(), drawn.batch, 1.0)
