"""Bit by bit: alone or in company, chunked or whole, whatever the block table and the padding."""

from dataclasses import replace

import pytest
import torch

from kernels.triton_gpu import backend
from kernels.triton_gpu.backend import Gpu, TritonKernels
from kernels.triton_gpu.work import StepWork, WorkList, step_work
from ops.gpu.ragged import Attention, answer, poisoned_pool, write_all
from tests.kernels.batches import Case, Drawn, draw, pack

HOW = {
    "plain": Attention(),
    "window": Attention(window=50),
    "soft cap": Attention(soft_cap=5.0),
}


def answered(drawn: Drawn, how: Attention) -> torch.Tensor:
    kernels = TritonKernels(torch.float16, Gpu())
    pool = poisoned_pool(kernels, drawn, torch.float16)
    write_all(pool, drawn)
    return answer(kernels, pool, drawn, how)


def part_of(drawn: Drawn, row: int, first: int, last: int) -> Drawn:
    """One sequence alone, as long as `last`; `first` and what follows are new; other blocks."""
    queries = drawn.queries[drawn.batch.row_starts[row] :]
    before = len(drawn.keys[row]) - int(drawn.batch.row_starts.diff()[row])
    num_blocks = -(-last // 16)
    return replace(
        drawn,
        batch=pack(((last, last - first),), 16, list(range(num_blocks)), torch.Generator()),
        keys=[drawn.keys[row][:last]],
        values=[drawn.values[row][:last]],
        queries=queries[first - before : last - before],
        num_blocks=num_blocks,
    )


@pytest.mark.parametrize("how", HOW)
def test_rows_do_not_depend_on_their_batch_mates(how: str) -> None:
    rows = ((600, 1), (300, 1), (40, 40), (5, 1), (90, 30))
    drawn = draw(Case(rows, 16, 4, 2), torch.float16)
    together = answered(drawn, HOW[how])
    starts = drawn.batch.row_starts.tolist()
    for row, (length, new) in enumerate(rows):
        alone = answered(part_of(drawn, row, length - new, length), HOW[how])
        assert torch.equal(alone, together[starts[row] : starts[row + 1]])


@pytest.mark.parametrize("how", HOW)
def test_chunks_of_a_prompt_are_the_whole_prompt(how: str) -> None:
    whole = draw(Case(((90, 90),), 16, 4, 2), torch.float16)
    at_once = answered(whole, HOW[how])
    for first, last in ((0, 23), (23, 40), (40, 90)):
        chunk = part_of(whole, 0, first, last)
        assert torch.equal(answered(chunk, HOW[how]), at_once[first:last])


def test_padding_of_the_work_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw(Case(((600, 1), (300, 1), (40, 40)), 16, 4, 2), torch.float16)
    bare = answered(drawn, Attention())
    num_padded = 0

    def padded_work(*args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal num_padded
        num_padded += 1
        work = step_work(*args, **kwargs)
        return StepWork(*(grown(part) for part in (work.decode, work.prefill)))

    def grown(work: WorkList) -> WorkList:
        return replace(
            work,
            items=torch.cat((torch.from_numpy(work.items), torch.zeros(3, 8).int())).numpy(),
            folds=torch.cat((torch.from_numpy(work.folds), torch.zeros(2, 4).int())).numpy(),
        )

    monkeypatch.setattr(backend, "step_work", padded_work)
    assert torch.equal(answered(drawn, Attention()), bare)
    assert num_padded == 1
