"""Steps laid out for the device: of their own size, or padded to a graph's."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.triton_gpu.step import Bounds, StepLayout, StepRows, Sums
from kernels.triton_gpu.tiles import Tile

pytestmark = pytest.mark.triton

TILE = Tile(rows=16, keys=64, warps=4, stages=2)
LAYOUT = StepLayout(heads=4, head_dim=16, group=2, decode=TILE, prefill=TILE, windows=(0, 100))
CPU = torch.device("cpu")


def rows(*lengths_and_new):
    """Rows of (context length, new tokens), in blocks of 16; each has its last logits."""
    lengths, new = (np.array(column, np.int64) for column in zip(*lengths_and_new, strict=True))
    starts = np.concatenate(([0], np.cumsum(new)))
    tables = np.concatenate(([0], np.cumsum(-(-lengths // 16))))
    positions = np.concatenate([np.arange(n - k, n) for n, k in zip(lengths, new, strict=True)])
    return StepRows(
        token_ids=100 + np.arange(starts[-1]), positions=positions, slots=positions,
        row_starts=starts, context_lengths=lengths, blocks=np.arange(tables[-1]),
        table_starts=tables, logit_tokens=starts[1:] - 1,
    )  # fmt: skip


def test_items_name_where_their_table_begins():
    laid = LAYOUT.lay_out(rows((40, 1), (300, 1), (20, 20)))
    assert laid.arrays["decode_items_0"][:, 0].tolist() == [0, 3, 3]  # 300 keys are two splits
    assert laid.arrays["prefill_items_0"][:, 0].tolist() == [22, 22, 22]
    assert laid.arrays["decode_folds_0"].tolist() == [[1, 0, 2, 0]]
    assert laid.num_partials == 2
    assert list(laid.arrays)[-1] == "blocks"


@pytest.mark.parametrize("windows", [(0, 100), (100, 0)])
def test_there_is_room_for_the_sums_of_the_widest_window(windows):
    """1,000 keys are four splits; the last 100 of them lie in one, which needs no sums."""
    laid = replace(LAYOUT, windows=windows).lay_out(rows((1000, 1)))
    assert len(laid.arrays["decode_items_0"]) == 4
    assert len(laid.arrays["decode_items_100"]) == 1
    assert laid.num_partials == 4


def test_missing_rows_are_written_nowhere_and_attend_to_nothing():
    laid = LAYOUT.lay_out(rows((40, 1), (300, 1)), Bounds(4, 16))
    assert laid.arrays["token_ids"].tolist() == [100, 101, 0, 0]
    assert laid.arrays["slots"].tolist() == [39, 299, -1, -1]
    for window in LAYOUT.windows:
        assert laid.arrays[f"decode_items_{window}"].shape == (16, 8)
        assert (laid.arrays[f"decode_items_{window}"][3:, 2] == 0).all()
        assert laid.arrays[f"decode_folds_{window}"].shape == (4, 4)
    assert laid.num_partials == 16


def test_what_a_graph_reads_is_of_its_size_whatever_the_step():
    sizes = [
        {name: array.shape for name, array in LAYOUT.lay_out(step, Bounds(4, 16)).arrays.items()}
        for step in (rows((1, 1)), rows((700, 1), (700, 1), (16, 1)))
    ]
    tables = [shapes.pop("blocks") for shapes in sizes]
    assert sizes[0] == sizes[1]
    assert tables == [(1,), (89,)]


@pytest.mark.parametrize(
    ("step", "bounds"),
    [
        (rows((40, 1), (41, 1), (42, 1)), Bounds(2, 8)),
        (rows((40, 2)), Bounds(2, 8)),
        (rows((2300, 1)), Bounds(2, 8)),
        (rows((300, 1)), Bounds(2, 2)),  # of two splits, and nobody to fold them
    ],
    ids=["rows", "tokens", "splits", "folds"],
)
def test_what_does_not_fit_is_not_laid_out(step, bounds):
    assert LAYOUT.lay_out(step, bounds) is None
    assert LAYOUT.lay_out(step) is not None


def test_more_logits_than_rows_do_not_fit():
    step = rows((40, 1))
    many = StepRows(
        step.token_ids, step.positions, step.slots, step.row_starts, step.context_lengths,
        step.blocks, step.table_starts, np.zeros(3, np.int64),
    )  # fmt: skip
    assert LAYOUT.lay_out(many, Bounds(2, 8)) is None


def test_a_batch_has_the_work_of_every_window():
    batch = LAYOUT.on(CPU, rows((40, 1), (20, 20)))
    assert set(batch.works) == {0, 100}
    assert [len(work.items) for work in batch.works[0]] == [1, 3]
    assert batch.block_tables.tolist() == [*range(5)]
    assert Sums.of(LAYOUT, 0, CPU).sums.shape == (1, 4, 16)
